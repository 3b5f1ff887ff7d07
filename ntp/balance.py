"""Gradient groups by the measured speed of each degree.

A plan deals groups out in proportion to the degrees; a replica at TP3 is not exactly three quarters as fast
as one at TP4. So where degrees differ, workers time the groups of a few steps of a generation and tell each
other, with the sum that they make in every step anyway. From the same figures all come to the same shares
(`decide`, pure and in integers). Shares say who computes a group, never how it is added, so no bit of the
result depends on a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from ntp.plan import Plan
from ntp.schedule import assign_by_time, fold_of

UNMEASURED_STEPS = 2
"""At the start of a generation: they compile, tune and capture."""
MEASURED_STEPS = 5
"""After those. The shares that follow hold for the rest of the generation."""

_PER_WORKER = 2
"""Figures: microseconds, spare gradient buffers."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The outcome of a measurement, the same on every worker.

    Attributes:
        times: nanoseconds that a microbatch takes at each degree; none for a degree that computes nothing.
        degrees: of each replica, by coordinate.
        shares: groups of each replica, in the order of `degrees`.
        kept: why the shares are still those by degree; "" where they are not.
    """

    times: Mapping[int, int]
    degrees: Mapping[int, int]
    shares: tuple[range, ...]
    kept: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values: times by degree, the number of groups by replica."""
        return {
            "ns_per_microbatch": {str(degree): time for degree, time in self.times.items()},
            "groups": {
                str(index): len(share) for index, share in zip(self.degrees, self.shares, strict=True)
            },
            "kept": self.kept,
        }

    def __str__(self) -> str:
        parts: list[str] = []
        for degree, time in self.times.items():
            of = zip(self.degrees.values(), self.shares, strict=True)
            counts = sorted({len(share) for other, share in of if other == degree})
            groups = "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
            parts.append(f"{groups} groups at degree {degree} ({time / 1e6:.3f} ms a microbatch)")
        kept = f"; still by degree: {self.kept}" if self.kept else ""
        return f"by measured speed: {', '.join(parts)}{kept}"


class Measurement:
    """One worker's part in the measurement of a generation.

    In each step it is asked for `figures` and then told the sum of all workers' figures, until `hear` returns
    the outcome. Figures are of the step before: a device has then completed it.
    """

    def __init__(self, plan: Plan, rank: int):
        self._plan, self._place = plan, plan.workers.index(rank)
        self._asked = 0
        self._told: list[Sequence[int]] = []

    def figures(self, microseconds: int, spare: int) -> list[int]:
        """What this worker adds to the sum: zero where others speak; empty in steps that do not count.

        Args:
            microseconds: that the groups of its replica took in the step before.
            spare: further gradient buffers that its device has room for.
        """
        self._asked += 1
        if self._asked <= UNMEASURED_STEPS + 1:
            return []
        figures = [0] * (_PER_WORKER * len(self._plan.workers))
        first = _PER_WORKER * self._place
        figures[first : first + _PER_WORKER] = [microseconds, spare]
        return figures

    def hear(self, told: Sequence[int]) -> Balance | None:
        """The outcome, once enough steps have been told of."""
        if told:
            self._told.append(told)
        if len(self._told) < MEASURED_STEPS:
            return None
        return decide(
            self._plan, [told[::_PER_WORKER] for told in self._told], self._told[-1][1::_PER_WORKER]
        )


def is_worth_measuring(plan: Plan) -> bool:
    """Whether other shares than those by degree are possible and could be better."""
    return not plan.is_uniform and plan.groups > len(plan.replicas)


def decide(plan: Plan, steps: Sequence[Sequence[int]], spare: Sequence[int]) -> Balance:
    """The shares by which the slowest replica finishes earliest; those of `plan` where none are better.

    Args:
        plan: with the shares that were measured.
        steps: for each measured step, the microseconds of every worker, in the order of `plan.workers`.
        spare: gradient buffers that each worker has room for beside those that it needs under `plan`.
    """
    times = _times(plan, steps)
    degrees = {replica.index: replica.degree for replica in plan.replicas}
    shares, kept = tuple(replica.groups for replica in plan.replicas), ""
    if set(times) != set(degrees.values()):
        kept = "a degree has no groups"
    else:
        of_replicas = [times[degree] for degree in degrees.values()]
        found = assign_by_time(plan.groups, of_replicas)
        if _longest(found, of_replicas) >= _longest(shares, of_replicas):
            kept = "nothing to gain"
        elif not _fits(plan, plan.with_shares(found), spare):
            kept = "more partial sums would not fit"
        else:
            shares = found
    return Balance(times, degrees, shares, kept)


def _times(plan: Plan, steps: Sequence[Sequence[int]]) -> dict[int, int]:
    """Nanoseconds of a microbatch by degree: the median over steps and replicas, by their slowest ranks."""
    seen: dict[int, list[int]] = {}
    for step in steps:
        first = 0
        for replica in plan.replicas:
            slowest = max(step[first : first + replica.degree])
            first += replica.degree
            if replica.microbatches:
                time = max(1, slowest * 1000 // len(replica.microbatches))
                seen.setdefault(replica.degree, []).append(time)
    return {degree: median_low(seen[degree]) for degree in sorted(seen, reverse=True)}


def _longest(shares: Sequence[range], times: Sequence[int]) -> int:
    return max(len(share) * time for share, time in zip(shares, times, strict=True))


def _fits(old: Plan, new: Plan, spare: Sequence[int]) -> bool:
    needs = zip(_buffers(old), _buffers(new), spare, strict=True)
    return all(after - before <= room for before, after, room in needs)


def _buffers(plan: Plan) -> list[int]:
    """Gradient buffers that each worker's sums fill: on its stack, being sent, and received (rounded up)."""
    folds = [fold_of(replica.groups, plan.groups) for replica in plan.replicas]
    received = -(-plan.copies * sum(len(fold.nodes) for fold in folds) // len(folds))
    return [
        fold.depth + plan.copies * len(fold.nodes) + received
        for replica, fold in zip(plan.replicas, folds, strict=True)
        for _ in replica.members
    ]
