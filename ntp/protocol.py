"""What launcher and workers tell each other, through a store that outlives every worker.

Pure: names of keys and the values under them. Keys are relative to the job's prefix. Writers never overwrite
each other: `GENERATION` belongs to the coordinator, a key that ends in a rank to that rank's process. Only
`REFUSED` is everybody's, since nobody knows who ends first.

| key                    | writer      | value                                                              |
|------------------------|-------------|--------------------------------------------------------------------|
| `generation`           | coordinator | `Generation`: the newest membership                                |
| `beat/<rank>`          | worker      | `Beat`: what it is doing; a beat that stays the same is a hang     |
| `arrived/<generation>` | workers     | a counter: processes that have come to the start of the generation |
| `started`              | reporter    | the last step before this run: 0, or that of the checkpoint        |
| `refused`              | workers     | why the run cannot begin with the state that was asked for         |
| `failure/<rank>`       | worker      | the error that it ends by, should its log have no room for it      |
| `metrics/<step>`       | reporter    | a line of `metrics.jsonl`; written again after a loss, read once   |
| `recovery/<generation>`| reporter    | `RecoveryTimes`                                                    |
| `finished`             | reporter    | the worker's part of `summary.json`; the job is complete           |
"""

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

GENERATION = "generation"
STARTED = "started"
REFUSED = "refused"
FINISHED = "finished"


def beat_key(rank: int) -> str:
    """Where a worker's heartbeat is."""
    return f"beat/{rank}"


def arrived_key(generation: int) -> str:
    """The counter of processes that are ready to build the groups of a generation."""
    return f"arrived/{generation}"


def metrics_key(step: int) -> str:
    """Where the metrics of a committed step are."""
    return f"metrics/{step}"


def recovery_key(generation: int) -> str:
    """Where the workers' part of a recovery's times is."""
    return f"recovery/{generation}"


def failure_key(rank: int) -> str:
    """Where a worker leaves the error that it ends by."""
    return f"failure/{rank}"


def snapshot_directory(run_dir: Path) -> Path:
    """Where the snapshots of a run are kept on its host: in memory, outside every worker.

    The launcher clears it before a run and after it.
    """
    memory = Path("/dev/shm")
    name = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"ntp-snapshots-{name}"


class Phase(StrEnum):
    """What a worker is doing. Only the phases of a step and `STARTUP` have a time limit of their own."""

    STARTUP = "startup"  # imports, data, groups, kernels
    WAITING = "waiting"  # for a generation that it belongs to, or for others to arrive: no limit
    MOVING = "moving"  # state between ranks, after a change of membership
    STEP = "step"  # forward and backward
    EXCHANGE = "exchange"  # gradients between replicas
    VOTE = "vote"  # the norm: from here on, whoever has it updates
    UPDATE = "update"
    CHECKPOINT = "checkpoint"
    FINISHING = "finishing"  # hashes and the last save


class _Message:
    """A frozen dataclass that travels as JSON."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Generation(_Message):
    """One membership of the job.

    Attributes:
        generation: counts up from 0.
        failed: process ranks that do not take part, ascending.
        at_boundary: switch after the step under way (somebody joins); otherwise at once (somebody is lost).
        cause: why membership changed, in one line.
        detected_at: when the launcher learned of it, seconds since the epoch.
    """

    generation: int
    failed: list[int]
    at_boundary: bool = False
    cause: str = ""
    detected_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Beat(_Message):
    """What a worker is doing.

    Attributes:
        generation: that it works in; -1 before its first.
        step: under way.
        phase: see `Phase`.
        count: grows with every beat, so that two beats of equal phases differ.
    """

    generation: int
    step: int
    phase: Phase
    count: int


@dataclass(frozen=True, slots=True)
class RecoveryTimes(_Message):
    """Seconds that a change of membership took, as the new generation's reporter saw them.

    Attributes:
        generation: that it led to.
        unblock: from the launcher's decision until this worker had left the old generation.
        rebuild: new groups.
        move: state between ranks.
        replay: from then until the next committed step.
        bytes_moved: of state, from one rank to another, of all ranks.
        steps_replayed: committed steps that had to be computed again; 0 unless state was lost.
        source: where lost state came from: `peers`, `snapshot`, `checkpoint` or `start`.
    """

    generation: int
    unblock: float
    rebuild: float
    move: float
    replay: float
    bytes_moved: int
    steps_replayed: int
    source: str
