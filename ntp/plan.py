"""The plan: one pure value that says who owns which units and who computes which microbatches.

`make_plan(config, failed)` is a function of its arguments alone: every process computes the same plan and
nothing has to be agreed by message but the set of failed ranks. `plan_units` is the same for a model that no
`ModelConfig` describes. Coordinates of the base mesh are numbered:
replica `r`, position `p` is `r * tp + p`, standbys come from `dp * tp` up. A process rank has the number of
its coordinate, unless `parallel.rank_map` puts another one there: that moves work, never bits.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ntp.config import Config, ParallelConfig
from ntp.errors import PlanError
from ntp.parameters import unit_counts
from ntp.schedule import assign_groups
from ntp.units import OwnerTable, UnitKind, UnitRange, count_units, spread

_EXTRAS_FIRST = {UnitKind.KV: True, UnitKind.FFN: False, UnitKind.VOCAB: False}
"""Positions with one KV group more than others get the smaller feed-forward and vocabulary shares."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One data-parallel coordinate that still computes.

    Attributes:
        index: data-parallel coordinate in the base mesh.
        members: process rank at each tensor-parallel position; its length is the degree.
        owners: for each unit kind, the units of each position.
        groups: gradient groups of a step that this replica computes.
        microbatches: the microbatches in those groups.
    """

    index: int
    members: tuple[int, ...]
    owners: Mapping[UnitKind, tuple[UnitRange, ...]]
    groups: range
    microbatches: range

    @property
    def degree(self) -> int:
        """Number of live tensor-parallel ranks."""
        return len(self.members)

    def owner_table(self, kind: UnitKind) -> OwnerTable:
        """Process rank -> units of `kind`."""
        return dict(zip(self.members, self.owners[kind], strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one generation of membership decides.

    Attributes:
        base_degree: the degree that the configuration asks for.
        units: number of units of each kind.
        groups: gradient groups in a step.
        group_size: microbatches in a group; the last may be short.
        microbatches: microbatches in a step.
        copies: how many replicas keep each slice of the optimizer state.
        replicas: the replicas that compute, by coordinate.
        dropped: coordinates that do not, each with the reason.
        standbys: live ranks that hold no shard.
        failed: ranks that do not exist.
    """

    generation: int
    base_degree: int
    units: Mapping[UnitKind, int]
    groups: int
    group_size: int
    microbatches: int
    copies: int
    replicas: tuple[Replica, ...]
    dropped: tuple[tuple[int, str], ...]
    standbys: tuple[int, ...]
    failed: tuple[int, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """Process ranks that hold a shard, in mesh order."""
        return tuple(rank for replica in self.replicas for rank in replica.members)

    @property
    def is_uniform(self) -> bool:
        """Whether every replica has the same degree."""
        return len({replica.degree for replica in self.replicas}) == 1

    @property
    def reporter(self) -> int:
        """The worker that writes metrics and whose output is shown: the one with the lowest rank."""
        return min(self.workers)

    @property
    def world(self) -> tuple[int, ...]:
        """Every process rank that is started: workers in mesh order, then standbys.

        In this order every replica and every column of positions ascends, as process groups need it.
        """
        return (*self.workers, *self.standbys)

    def microbatches_of(self, group: int) -> range:
        """The microbatches of one gradient group, in the order in which they are folded."""
        return range(self.microbatches)[group * self.group_size : (group + 1) * self.group_size]

    def with_shares(self, shares: Sequence[range]) -> "Plan":
        """The same plan with other groups for each of `replicas`; who owns what stays as it is."""
        replicas = (
            replace(
                replica, groups=share, microbatches=_microbatches(share, self.group_size, self.microbatches)
            )
            for replica, share in zip(self.replicas, shares, strict=True)
        )
        return replace(self, replicas=tuple(replicas))

    def replica_of(self, rank: int) -> Replica:
        """The replica that `rank` works in; KeyError for a standby."""
        for replica in self.replicas:
            if rank in replica.members:
                return replica
        raise KeyError(rank)

    def to_json(self) -> dict[str, object]:
        """The plan as plain JSON values."""
        return {
            "generation": self.generation,
            "base_degree": self.base_degree,
            "units": {kind.value: count for kind, count in self.units.items()},
            "groups": self.groups,
            "group_size": self.group_size,
            "microbatches": self.microbatches,
            "copies": self.copies,
            "replicas": [_replica_json(replica) for replica in self.replicas],
            "dropped": [{"index": index, "reason": reason} for index, reason in self.dropped],
            "workers": list(self.workers),
            "standbys": list(self.standbys),
            "failed": list(self.failed),
        }


def make_plan(config: Config, failed: Collection[int] = (), generation: int = 0) -> Plan:
    """Plan a job on the ranks that are left.

    Args:
        config: the whole configuration.
        failed: process ranks that do not exist, standbys included.
        generation: how often membership has changed since the start.

    Raises:
        PlanError: `parallel.tp` exceeds the units of every kind, or no replica is left.
    """
    train = config.train
    return plan_units(
        unit_counts(config.model),
        config.parallel,
        train.microbatches,
        group_size=train.grad_group,
        copies=config.optimizer.copies,
        failed=failed,
        generation=generation,
    )


def plan_units(
    units: Mapping[UnitKind, int],
    parallel: ParallelConfig,
    microbatches: int,
    *,
    group_size: int = 1,
    copies: int = 2,
    failed: Collection[int] = (),
    generation: int = 0,
) -> Plan:
    """Plan a job of any model.

    Args:
        units: number of units of each kind that the model has.
        parallel: the base mesh.
        microbatches: microbatches in a step.
        group_size: microbatches in a gradient group.
        copies: how many replicas keep each slice of the optimizer state (all, where there are fewer).
        failed, generation: see `make_plan`.

    Raises:
        PlanError: see `make_plan`.
    """
    most = max(units, key=lambda kind: units[kind])
    if parallel.tp > units[most]:
        raise PlanError(
            f"parallel.tp={parallel.tp} leaves ranks without any unit: "
            f"the model has at most {units[most]} units of one kind ({most.value}); lower it"
        )
    ranks = parallel.rank_map or range(parallel.world_size)
    slots, idle = _fill(ranks, parallel.dp, parallel.tp, frozenset(failed))
    kept, dropped, spilled = _keep(slots, parallel.min_degree, parallel.policy)
    if not kept:
        raise PlanError(f"no replica is left with failed ranks {sorted(failed)}: {_reasons(dropped)}")
    groups = count_units(microbatches, group_size)
    shares = assign_groups(groups, [len(members) for members in kept.values()])
    owners = {
        degree: {kind: spread(count, degree, _EXTRAS_FIRST[kind]) for kind, count in units.items()}
        for degree in {len(members) for members in kept.values()}
    }
    replicas = tuple(
        Replica(
            index=index,
            members=members,
            owners=owners[len(members)],
            groups=share,
            microbatches=_microbatches(share, group_size, microbatches),
        )
        for (index, members), share in zip(kept.items(), shares, strict=True)
    )
    return Plan(
        generation=generation,
        base_degree=parallel.tp,
        units=units,
        groups=groups,
        group_size=group_size,
        microbatches=microbatches,
        copies=min(copies, len(replicas)),
        replicas=replicas,
        dropped=dropped,
        standbys=tuple(sorted((*idle, *spilled))),
        failed=tuple(sorted(failed)),
    )


def _fill(
    ranks: Sequence[int], dp: int, tp: int, failed: frozenset[int]
) -> tuple[list[list[int | None]], list[int]]:
    """Live rank (or None) at every position, after standbys have taken over what they can.

    `ranks` are the process ranks by coordinate. A standby goes to the replica that misses most ranks, to its
    lowest missing position.
    """
    slots: list[list[int | None]] = [
        [None if rank in failed else rank for rank in ranks[r * tp : (r + 1) * tp]] for r in range(dp)
    ]
    idle = [rank for rank in ranks[dp * tp :] if rank not in failed]
    needy = [(-missing, index) for index, replica in enumerate(slots) if (missing := replica.count(None))]
    heapq.heapify(needy)
    taken = min(len(idle), -sum(missing for missing, _ in needy))
    for rank in idle[:taken]:
        missing, index = needy[0]
        slots[index][slots[index].index(None)] = rank
        heapq.heapreplace(needy, (missing + 1, index))
    return slots, idle[taken:]


def _keep(
    slots: Sequence[Sequence[int | None]], min_degree: int, policy: str
) -> tuple[dict[int, tuple[int, ...]], tuple[tuple[int, str], ...], list[int]]:
    """Members of the replicas that go on, the dropped ones with reasons, and the ranks left over."""
    kept: dict[int, tuple[int, ...]] = {}
    dropped: list[tuple[int, str]] = []
    spilled: list[int] = []
    for index, replica in enumerate(slots):
        members = tuple(rank for rank in replica if rank is not None)
        if not members:
            dropped.append((index, "no rank left"))
        elif len(members) < min_degree:
            dropped.append((index, f"degree {len(members)} is under parallel.min_degree {min_degree}"))
            spilled += members
        else:
            kept[index] = members
    if policy == "uniform" and kept:
        degree = min(len(members) for members in kept.values())
        spilled += [rank for members in kept.values() for rank in members[degree:]]
        kept = {index: members[:degree] for index, members in kept.items()}
    return kept, tuple(dropped), spilled


def _microbatches(share: range, group_size: int, microbatches: int) -> range:
    """Those in a range of groups, of which the last one of a step may be short."""
    return range(microbatches)[share.start * group_size : share.stop * group_size]


def _reasons(dropped: tuple[tuple[int, str], ...]) -> str:
    return "; ".join(f"replica {index}: {reason}" for index, reason in dropped)


def _replica_json(replica: Replica) -> dict[str, object]:
    return {
        "index": replica.index,
        "degree": replica.degree,
        "members": list(replica.members),
        "units": {k.value: [[r.start, r.stop] for r in ranges] for k, ranges in replica.owners.items()},
        "groups": [replica.groups.start, replica.groups.stop],
        "microbatches": [replica.microbatches.start, replica.microbatches.stop],
    }
