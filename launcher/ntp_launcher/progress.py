"""What is known of a run while it goes on, as values: fed with news, it gives a `Snapshot` to be shown.

Pure: the time is an argument. Terminals, TensorBoard and the Prometheus endpoint all read the same snapshot,
so that no two of them can disagree.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ntp.config import Config
from ntp.errors import PlanError
from ntp.plan import Plan, make_plan
from ntp.protocol import Generation

_SMOOTHING = 0.1  # weight of the newest step in shown rates
_LOSSES = 512
_HAPPENINGS = 64
RECOVERY_PARTS = ("detect", "agree", "unblock", "rebuild", "move", "replay")
"""What a change of membership spends seconds on, in this order; keys of `recoveries` in `summary.json`."""


class Mark(StrEnum):
    """What a place of the mesh is doing."""

    LIVE = "live"
    STANDBY = "standby"
    COMING = "coming"  # its process is started, or its device looked at
    RECOVERING = "recovering"  # a member of a generation that has not committed a step yet
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that a user wants to know of: `kind` is loss, join, recovery, save, note, warning or end."""

    time: float
    kind: str
    text: str
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ReplicaMarks:
    """A replica of the base mesh: a mark for every position."""

    index: int
    degree: int
    base_degree: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        now, started: seconds since the epoch.
        step, first, last: the newest committed step, the one before this run, and the last one to come.
        line: the newest line of metrics, {} before the first.
        losses: of the newest steps, oldest first.
        step_s, tokens_per_s: smoothed; None before the first step.
        mfu: share of the devices' peak that the model's arithmetic takes; None where the peak is not known.
        shares: of a step's time by phase, smoothed.
        goodput: share of the time in which committed steps were computed.
        capacity: ranks with a shard over ranks of the base mesh; `mean_capacity` is its mean over time.
        recovering_s: how long the newest change of membership has been going on; None = it is over.
        recoveries: losses so far; `last_recovery` holds the newest known times of one, in seconds.
    """

    now: float
    started: float
    step: int
    first: int
    last: int
    line: Mapping[str, Any]
    losses: tuple[float, ...]
    step_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    shares: Mapping[str, float]
    goodput: float
    capacity: float
    mean_capacity: float
    generation: int
    recovering_s: float | None
    recoveries: int
    last_recovery: Mapping[str, float]
    replicas: tuple[ReplicaMarks, ...]
    standbys: tuple[Mark, ...]
    happenings: tuple[Happening, ...]

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, at the present rate."""
        return None if self.step_s is None else (self.last - self.step) * self.step_s


class Progress:
    """Gathers news of one run.

    Args:
        peak_flops: of one device in the compute dtype; None = not known.
        now: the start of the run.
    """

    def __init__(self, config: Config, now: float, peak_flops: float | None = None) -> None:
        self._config, self._started, self._peak = config, now, peak_flops
        self._first = self._step = 0
        self._line: Mapping[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._happenings: deque[Happening] = deque(maxlen=_HAPPENINGS)
        self._step_s: float | None = None
        self._tokens_per_s: float | None = None
        self._shares: dict[str, float] = {}
        self._productive_s = 0.0
        self._generation = Generation(0, [])
        self._plan: Plan | None = None
        self._opened_at: float | None = None
        self._recoveries = 0
        self._last_recovery: dict[str, float] = {}
        self._coming: frozenset[int] = frozenset()
        self._capacity_since, self._capacity_sum = now, 0.0
        self._flops = flops_per_token(config)

    def begin(self, generation: Generation, first: int = 0) -> None:
        """The first generation; steps up to `first` were committed by an earlier run."""
        self._first = self._step = first
        self._enter(generation)

    def opened(self, generation: Generation, now: float) -> None:
        """A new generation."""
        self._capacity_sum += self._capacity() * (now - self._capacity_since)
        self._capacity_since = now
        self._recoveries += not generation.at_boundary
        self._opened_at = now
        self._enter(generation)

    def coming(self, ranks: Iterable[int]) -> None:
        """The ranks whose processes are on their way."""
        self._coming = frozenset(ranks)

    def committed(self, line: Mapping[str, Any]) -> None:
        """A step is done."""
        if self._step == 0 and not self._line:
            self._first = line["step"] - 1
        self._line, self._step = line, line["step"]
        self._losses.append(line["loss"])
        if line["generation"] == self._generation.generation:
            self._opened_at = None
        seconds = line["step_time_s"]
        if seconds:
            self._productive_s += seconds
            self._step_s = _smooth(self._step_s, seconds)
            self._tokens_per_s = _smooth(self._tokens_per_s, line["tokens_per_s"])
            for name, part in line.get("phases_s", {}).items():
                self._shares[name] = _smooth(self._shares.get(name), part / seconds)

    def happened(self, happening: Happening) -> None:
        """Something to be listed."""
        self._happenings.append(happening)
        if happening.kind == "recovery":
            self._last_recovery = {key: happening.values.get(key, 0.0) for key in RECOVERY_PARTS}

    def snapshot(self, now: float) -> Snapshot:
        """All of it, at this time."""
        wall = max(now - self._started, 1e-9)
        capacity = self._capacity()
        spent = self._capacity_sum + capacity * (now - self._capacity_since)
        rate = self._tokens_per_s
        devices = len(self._plan.workers) if self._plan else 0
        peak = self._peak * devices if self._peak else None
        return Snapshot(
            now=now,
            started=self._started,
            step=self._step,
            first=self._first,
            last=self._config.train.last_step,
            line=self._line,
            losses=tuple(self._losses),
            step_s=self._step_s,
            tokens_per_s=rate,
            mfu=rate * self._flops / peak if rate and peak else None,
            shares=dict(self._shares),
            goodput=min(1.0, self._productive_s / wall),
            capacity=capacity,
            mean_capacity=spent / wall if now > self._started else capacity,
            generation=self._generation.generation,
            recovering_s=None if self._opened_at is None else max(0.0, now - self._opened_at),
            recoveries=self._recoveries,
            last_recovery=self._last_recovery,
            replicas=self._replicas(),
            standbys=self._standbys(),
            happenings=tuple(self._happenings),
        )

    def _enter(self, generation: Generation) -> None:
        self._generation = generation
        try:
            self._plan = make_plan(self._config, generation.failed, generation.generation)
        except PlanError:  # the job is about to end for it
            self._plan = None

    def _capacity(self) -> float:
        parallel = self._config.parallel
        return len(self._plan.workers) / (parallel.dp * parallel.tp) if self._plan else 0.0

    def _replicas(self) -> tuple[ReplicaMarks, ...]:
        parallel = self._config.parallel
        ranks = parallel.rank_map or range(parallel.world_size)
        live = {replica.index: replica.members for replica in self._plan.replicas} if self._plan else {}
        return tuple(
            self._replica(index, ranks[index * parallel.tp : (index + 1) * parallel.tp], live.get(index, ()))
            for index in range(parallel.dp)
        )

    def _replica(self, index: int, base: Sequence[int], members: Sequence[int]) -> ReplicaMarks:
        """Standbys that have taken over stand at the places of those they replace."""
        spare = [rank for rank in members if rank not in base]
        marks: list[Mark] = []
        for rank in base:
            if rank in members:
                marks.append(self._live_mark())
            elif spare:
                spare.pop(0)
                marks.append(self._live_mark())
            else:
                marks.append(self._other_mark(rank))
        return ReplicaMarks(index, len(members), len(base), tuple(marks))

    def _standbys(self) -> tuple[Mark, ...]:
        parallel = self._config.parallel
        ranks = parallel.rank_map or range(parallel.world_size)
        working = set(self._plan.workers) if self._plan else set[int]()
        return tuple(
            self._live_mark() if rank in working else self._other_mark(rank)
            for rank in ranks[parallel.dp * parallel.tp :]
        )

    def _live_mark(self) -> Mark:
        return Mark.LIVE if self._opened_at is None else Mark.RECOVERING

    def _other_mark(self, rank: int) -> Mark:
        if self._plan is not None and rank in self._plan.standbys:
            return Mark.STANDBY
        return Mark.COMING if rank in self._coming else Mark.LOST


def flops_per_token(config: Config) -> int:
    """Floating-point operations of forward and backward that a token needs, products with weights and causal
    attention; what a peak is compared with (Chowdhery et al. 2022), recomputation and padding not counted.
    """
    model = config.model
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    attention = model.hidden_size * model.head_dim * 2 * (heads + kv)
    weights = model.num_hidden_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
    scores = model.num_hidden_layers * heads * model.head_dim * config.train.seq_len
    return 6 * (weights + model.hidden_size * model.vocab_size) + 6 * scores


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
