"""How long a replica of each degree takes, and which degrees fit into memory.

Time of a step of one replica = (microbatches + pp - 1) * microbatch time of its slowest stage (1F1B without
interleaving); the job takes the slowest replica's, then the slowest exchange and update. Data loading and
launch gaps are left out: a measured table has them in its numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntp.planner.memory import estimate_replica
from ntp.planner.outages import number_in, read_rows
from ntp.planner.plans import Plans
from ntp.planner.study import Batch, Job, Step, StudyError
from ntp.planner.work import Spread, exchange_time, heaviest_rank, microbatch_time, update_time
from ntp.units import count_units

Floats = NDArray[np.float64]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds by degree, index 0 to tp; infinity where a degree cannot run.

    Attributes:
        microbatch: of the slowest stage of a replica.
        exchange: of gradients and parameters between the replicas, the part that is not hidden, and update.
        why_not: degree -> reason, for degrees that cannot run.
        pp: pipeline stages.
    """

    microbatch: Floats
    exchange: Floats
    why_not: Mapping[int, str]
    pp: int

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Whether a degree can run."""
        return np.isfinite(self.microbatch)

    def compute(self, degrees: NDArray[np.integer], microbatches: NDArray[np.integer]) -> Floats:
        """Seconds of each replica before the exchange; 0 without microbatches."""
        busy = np.asarray(microbatches) > 0
        stages = np.asarray(microbatches) + self.pp - 1
        seconds = np.zeros(np.shape(microbatches))
        return np.multiply(stages, self.microbatch[degrees], out=seconds, where=busy)

    def local_batch(self, whole: int, speed: Floats) -> NDArray[np.int64]:
        """Microbatches, by degree, that fit into the time a healthy replica needs for `whole` of them.

        `speed` is a factor by degree. At most `whole`; 0 for a degree that cannot run.
        """
        budget = (whole + self.pp - 1) * self.microbatch[-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.floor(budget * speed / self.microbatch + 1e-9) - (self.pp - 1)
        return np.clip(np.where(self.usable, fits, 0), 0, whole).astype(np.int64)


def step_times(step: Step, job: Job, plans: Plans) -> StepTimes:
    """The times of a job under the chosen model. Raises StudyError if the healthy job does not fit."""
    microbatch, exchange = np.full(job.tp + 1, np.inf), np.full(job.tp + 1, np.inf)
    why_not = dict.fromkeys(range(job.min_degree), f"under min_degree {job.min_degree}")
    measured = read_table(step.table, job.tp) if step.table else {}
    for degree in range(job.min_degree, job.tp + 1):
        if step.times == "proportional":
            times = job.tp / degree, 0.0
        elif measured:
            times = interpolate(measured, degree)
        else:
            times, need = analytic(step, job, plans, degree), needed_gib(job, plans, degree)
            if need > step.gpu.memory_gib:
                why_not[degree] = f"needs {need:.0f} GiB a GPU, has {step.gpu.memory_gib:g}"
                continue
        microbatch[degree], exchange[degree] = times
        if not np.isfinite(times[0]):
            why_not[degree] = "outside the measured table"
    if not np.isfinite(microbatch[job.tp]):
        raise StudyError(f"tp {job.tp} cannot run at all: {why_not[job.tp]}")
    return StepTimes(microbatch, exchange, why_not, job.pp)


def analytic(step: Step, job: Job, plans: Plans, degree: int) -> tuple[float, float]:
    """Seconds of a microbatch, and of exchange and update, on the busiest rank (`ntp.planner.work`)."""
    rank = heaviest_rank(job, plans, degree)
    copies = min(plans.config.optimizer.copies, job.dp)
    groups = count_units(_microbatches(job.batch, job.dp), job.batch.grad_group)
    spread = Spread(job.dp, copies, groups, nodes=1, all_nodes=job.dp, uniform=degree == job.tp)
    exchange = (1 - step.overlap) * exchange_time(rank, spread, step.gpu.network_gbytes_s)
    microbatch = microbatch_time(step, job, rank, degree).total(step.overlap)
    return microbatch, exchange + update_time(rank, spread, step.gpu)


def needed_gib(job: Job, plans: Plans, degree: int) -> float:
    """Memory of the fullest rank of a replica of this degree beside whole ones, by `ntp.planner.memory`.

    A pipeline stage has its share of the layers and one of the two tables, and the activations of as many
    microbatches as are under way in it.
    """
    layers = count_units(job.model.num_hidden_layers, job.pp)
    tied = job.pp > 1 or job.model.tie_word_embeddings
    model = job.model.model_copy(update={"num_hidden_layers": layers, "tie_word_embeddings": tied})
    config = plans.config.model_copy(update={"model": model})
    more = min(job.pp, _microbatches(job.batch, job.dp)) - 1
    ranks = estimate_replica(config, plans.with_one_at(degree), 0)
    return max(rank.total + more * rank.activations for rank in ranks) / _GIB


def _microbatches(batch: Batch, dp: int) -> int:
    return count_units(batch.global_batch // batch.micro_batch, dp)


def read_table(path: str, tp: int) -> dict[int, tuple[float, float]]:
    """Measured seconds by degree: a CSV with the header `degree,microbatch_s,exchange_s`.

    Raises StudyError for a line that cannot be one, or where degree `tp` is missing.
    """
    table: dict[int, tuple[float, float]] = {}
    for line, row in read_rows(path, ["degree", "microbatch_s", "exchange_s"]):
        degree, microbatch, exchange = (
            number_in(path, line, name, text)
            for name, text in zip(("degree", "microbatch_s", "exchange_s"), row, strict=True)
        )
        if degree != int(degree) or not 1 <= degree <= tp:
            raise StudyError(f"{path}, line {line}: degree {row[0]} is not a whole number from 1 to {tp}")
        if int(degree) in table:
            raise StudyError(f"{path}, line {line}: degree {row[0]} is given twice")
        if microbatch == 0:
            raise StudyError(f"{path}, line {line}: microbatch_s {row[1]} must be above 0")
        table[int(degree)] = microbatch, exchange
    if tp not in table:
        raise StudyError(f"{path} has no line for degree {tp}, the degree of a healthy replica")
    return table


def interpolate(table: Mapping[int, tuple[float, float]], degree: int) -> tuple[float, float]:
    """Times of a degree between two measured ones, on a straight line over 1 / degree; infinity outside."""
    if degree < min(table):
        return float("inf"), float("inf")
    known = sorted(table, reverse=True)
    inverse = [1 / each for each in known]
    microbatch, exchange = (
        float(np.interp(1 / degree, inverse, [table[each][place] for each in known])) for place in (0, 1)
    )
    return microbatch, exchange
