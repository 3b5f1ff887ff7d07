"""How long a replica of each degree takes, and which degrees fit into memory.

Time of a step of one replica = (microbatches + pp - 1) * microbatch time of its slowest stage (1F1B without
interleaving); the job takes the slowest replica's, then the slowest exchange. Optimizer, data loading and
launch gaps are left out: a measured table has them in its numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntp.parameters import parameter_specs
from ntp.planner.outages import number_in, read_rows
from ntp.planner.plans import Plans
from ntp.planner.study import Batch, Job, Step, StudyError
from ntp.units import UnitKind, count_units

Floats = NDArray[np.float64]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds by degree, index 0 to tp; infinity where a degree cannot run.

    Attributes:
        microbatch: of the slowest stage of a replica.
        exchange: of gradients and parameters between the replicas, the part that is not hidden.
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
            rank = heaviest_rank(job, plans, degree)
            times, need = analytic(step, job, rank, degree), memory_gib(step, job, rank, degree)
            if need > step.gpu.memory_gib:
                why_not[degree] = f"needs {need:.0f} GiB a GPU, has {step.gpu.memory_gib:g}"
                continue
        microbatch[degree], exchange[degree] = times
        if not np.isfinite(times[0]):
            why_not[degree] = "outside the measured table"
    if not np.isfinite(microbatch[job.tp]):
        raise StudyError(f"tp {job.tp} cannot run at all: {why_not[job.tp]}")
    return StepTimes(microbatch, exchange, why_not, job.pp)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What the slowest rank of a stage holds and computes for one token, of all `layers` of the stage.

    Attributes:
        elements: stored elements, replicated ones left out.
        macs: multiply-adds of a forward pass outside attention.
        heads: query heads of one layer.
    """

    layers: int
    elements: int
    macs: int
    heads: int


def heaviest_rank(job: Job, plans: Plans, degree: int) -> RankLoad:
    """The rank with most multiply-adds, in the stage with most of them: the last one, which has the head."""
    model, units = job.model, plans.units_at(degree)
    layers = count_units(model.num_hidden_layers, job.pp)
    per_layer = dict.fromkeys(UnitKind, 0)  # elements of a unit in one layer
    for spec in parameter_specs(model.model_copy(update={"num_hidden_layers": 1})):
        if spec.kind:
            per_layer[spec.kind] += spec.unit_elements
    head = model.vocab_unit * model.hidden_size
    loads: list[RankLoad] = []
    for kv, ffn, vocab in zip(units[UnitKind.KV], units[UnitKind.FFN], units[UnitKind.VOCAB], strict=True):
        body = layers * (kv * per_layer[UnitKind.KV] + ffn * per_layer[UnitKind.FFN])
        tables = 2 if job.pp == 1 and not model.tie_word_embeddings else 1
        heads = kv * (model.num_attention_heads // model.num_key_value_heads)
        loads.append(RankLoad(layers, body + tables * vocab * head, body + vocab * head, heads))
    return max(loads, key=lambda load: (load.macs, load.heads))


def analytic(step: Step, job: Job, rank: RankLoad, degree: int) -> tuple[float, float]:
    """Seconds of a microbatch and of the exchange.

    A forward pass costs 2 FLOP a multiply-add, a backward pass twice that; causal attention half the square,
    and 2.5 times as much backward (the scores are computed again). Four all-reduces a layer in the domain,
    as rings.
    """
    gpu, batch, model = step.gpu, job.batch, job.model
    tokens = batch.micro_batch * batch.seq_len
    gemm = 6 * tokens * rank.macs / (gpu.peak_tflops * 1e12 * gpu.gemm_efficiency)
    scores = 2 * tokens * batch.seq_len * model.head_dim * rank.heads * rank.layers
    attention = 3.5 * scores / (gpu.peak_tflops * 1e12 * gpu.attention_efficiency)
    payload = 4 * rank.layers * tokens * model.hidden_size * step.sum_bytes
    sums = payload * 2 * (degree - 1) / degree / (gpu.nvlink_gbytes_s * 1e9)
    traffic = rank.elements * step.exchange_bytes * (job.dp - 1) / job.dp
    exchange = traffic / (gpu.network_gbytes_s * 1e9)
    return gemm + attention + (1 - step.overlap) * sums, (1 - step.overlap) * exchange


def memory_gib(step: Step, job: Job, rank: RankLoad, degree: int) -> float:
    """Weights, gradients, optimizer state and activations of the heaviest rank.

    Activations: (10 + 24 / degree) bytes an element of the residual stream and layer (Korthikanti et al.
    2022, without the scores, which are computed again), for as many microbatches as the pipeline holds.
    """
    weights = rank.elements * (step.weight_bytes + step.state_bytes / job.dp)
    elements = job.batch.micro_batch * job.batch.seq_len * job.model.hidden_size * rank.layers
    return (weights + elements * (10 + 24 / degree) * min(job.pp, _microbatches(job.batch, job.dp))) / _GIB


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
