"""The best layout for one set of failed ranks: which ranks form which replica, as a rank map.

Candidates move damage inside the given machine and are judged by the very plan that the launcher will make,
under the time model of `step_time`. The given layout is always a candidate, so the advice is never worse.
A replica never spans more domains than before.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ntp.config import Config
from ntp.errors import PlanError
from ntp.plan import Plan, make_plan
from ntp.planner.plans import Plans
from ntp.planner.step_time import StepTimes, step_times
from ntp.planner.study import Step, job_of


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run the job.

    Attributes:
        name: how it was made.
        rank_map: process rank at each coordinate of the base mesh, standbys last.
        min_degree: `parallel.min_degree` to launch with.
        plan: what the launcher will make of it.
        seconds: predicted time of a step.
    """

    name: str
    rank_map: tuple[int, ...]
    min_degree: int
    plan: Plan
    seconds: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The given layout, None if it cannot run, and the best one; equal where nothing is gained."""

    given: Layout | None
    best: Layout
    times: StepTimes


def advise(config: Config, failed: Collection[int], domain_size: int, step: Step) -> Advice:
    """Choose a layout.

    Args:
        config: the training configuration; its own rank map, if any, is the given layout.
        failed: process ranks that do not exist.
        domain_size: consecutive process ranks that share NVLink.
        step: the time model.

    Raises:
        PlanError: no layout can run.
        StudyError: the healthy job does not fit the model.
    """
    parallel = config.parallel
    times = step_times(step, job_of(config), Plans(config))
    given = tuple(parallel.rank_map or range(parallel.world_size))
    found: list[Layout] = []
    refused = ""
    for name, rank_map in _candidates(given, parallel.dp, parallel.tp, frozenset(failed), domain_size):
        try:
            found += _layouts(config, failed, times, name, rank_map)
        except PlanError as error:
            refused = refused or str(error)
    if not found:
        raise PlanError(refused or f"no degree fits into memory: {dict(times.why_not)}")
    first = found[0]
    given_runs = first.rank_map == given and first.min_degree == parallel.min_degree
    return Advice(first if given_runs else None, min(found, key=lambda layout: layout.seconds), times)


def _layouts(
    config: Config, failed: Collection[int], times: StepTimes, name: str, rank_map: tuple[int, ...]
) -> Iterator[Layout]:
    """The layout of a rank map at each minimum degree that makes a difference, the configuration's first."""
    parallel = config.parallel
    plan = _plan(config, failed, rank_map, parallel.min_degree)
    degrees = sorted({replica.degree for replica in plan.replicas})
    for place, min_degree in enumerate([parallel.min_degree, *(degree for degree in degrees[1:])]):
        plan = _plan(config, failed, rank_map, min_degree) if place else plan
        seconds = predicted_seconds(plan, times)
        if seconds < float("inf"):
            yield Layout(name, rank_map, min_degree, plan, seconds)


def _plan(config: Config, failed: Collection[int], rank_map: tuple[int, ...], min_degree: int) -> Plan:
    parallel = config.parallel.model_copy(update={"rank_map": rank_map, "min_degree": min_degree})
    return make_plan(config.model_copy(update={"parallel": parallel}), failed)


def predicted_seconds(plan: Plan, times: StepTimes) -> float:
    """Seconds of a step: the slowest replica, then the slowest exchange; infinity if a degree cannot run."""
    slowest = max(
        (len(replica.microbatches) + times.pp - 1) * times.microbatch[replica.degree]
        for replica in plan.replicas
        if replica.microbatches
    )
    return float(slowest + max(times.exchange[replica.degree] for replica in plan.replicas))


def _candidates(
    given: tuple[int, ...], dp: int, tp: int, failed: frozenset[int], domain_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Rank maps worth trying, the given one first, then those made from ranks in their own order.

    Blocks of ranks that may trade places are found from domains: ranks of one domain that serves several
    replicas, or whole domains if a replica has several. Damage then goes to 1, 2, ... replicas of a block.
    """
    yield "as given", given
    everyone = tuple(range(len(given)))
    ranks, standbys = everyone[: dp * tp], everyone[dp * tp :]
    seen = {given}
    if everyone != given:
        seen.add(everyone)
        yield "ranks in order", everyone
    if domain_size % tp == 0:
        size, piece = domain_size, 1
    elif tp % domain_size == 0:
        size, piece = dp * tp, domain_size
    else:
        return
    blocks = [ranks[start : start + size] for start in range(0, dp * tp, size)]
    for targets in range(1, size // tp + 1):
        dealt = [rank for block in blocks for rank in _deal(block, tp, piece, targets, failed)]
        rank_map = (*dealt, *standbys)
        if rank_map not in seen:
            seen.add(rank_map)
            yield f"damage in {targets} replica{'s' * (targets > 1)} of {size} ranks", rank_map


def _deal(block: Sequence[int], tp: int, piece: int, targets: int, failed: frozenset[int]) -> tuple[int, ...]:
    """The ranks of a block by coordinate, with the damage dealt evenly to its last `targets` replicas.

    Pieces of `piece` consecutive ranks stay together. Worst pieces go first, each to the target with the
    least damage that has room; what finds none stays with the other replicas.
    """
    pieces = [tuple(block[start : start + piece]) for start in range(0, len(block), piece)]
    damage = {each: len(failed.intersection(each)) for each in pieces}
    replicas: list[list[tuple[int, ...]]] = [[] for _ in range(len(block) // tp)]
    room = tp // piece
    for each in sorted((each for each in pieces if damage[each]), key=lambda each: (-damage[each], each)):
        wanted = [replica for replica in replicas[::-1][:targets] if len(replica) < room]
        wanted = wanted or [replica for replica in replicas[::-1] if len(replica) < room]
        min(wanted, key=lambda replica: sum(damage[other] for other in replica)).append(each)
    healthy = iter(sorted(each for each in pieces if not damage[each]))
    for replica in replicas:
        replica[:0] = [next(healthy) for _ in range(room - len(replica))]
    return tuple(rank for replica in replicas for each in replica for rank in each)
