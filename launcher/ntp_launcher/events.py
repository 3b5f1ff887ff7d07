"""What happens to a job (events) and what the coordinator has done about it (actions), as values.

A process is named by its rank and its incarnation (the first process of a rank is 0), an agent by
its node and its session, so that late news of an old one cannot be taken for news of its successor.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ntp.protocol import Generation


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process has ended, at most `noticed_s` ago; `error` is the last error line of its stderr."""

    rank: int
    incarnation: int
    code: int
    error: str = ""
    noticed_s: float = 0.0
    host: str = ""


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker gives no sign of life and holds up the others."""

    rank: int
    incarnation: int
    doing: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker that was started in mid-run waits to be taken in."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class TouchLost:
    """Every member of a generation has left it, and none has died: a connection broke, or was too slow."""

    generation: int
    noticed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """The device of a rank has been looked at before its process number `incarnation` is started."""

    rank: int
    incarnation: int
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AgentJoined:
    """The agent of a node is there."""

    node: int
    session: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent of a node has left, or has not renewed its lease; its workers are dead by now."""

    node: int
    session: int
    reason: str
    noticed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HealRequested:
    """A user says that these devices are well."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step is done, in this generation."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The run cannot begin with the state that was asked for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is complete."""


Event = (
    WorkerExited
    | WorkerHung
    | WorkerReady
    | TouchLost
    | ProbeDone
    | AgentJoined
    | AgentLost
    | HealRequested
    | StepCommitted
    | Refused
    | Finished
)


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a new generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process at once."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Look at the device of a rank."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class End:
    """The job is over: exit with this code.

    Attributes:
        rank, host: whose log tells the cause; None, "" where no log does.
        others: ranks whose ends are consequences.
    """

    code: int
    reason: str
    rank: int | None = None
    host: str = ""
    others: Sequence[int] = ()


Action = Open | Kill | Probe | Start | End

_MAILED = {kind.__name__: kind for kind in (WorkerExited, ProbeDone, AgentLost, Kill, Probe, Start, End)}
"""What travels between agents."""

Mailed = WorkerExited | ProbeDone | AgentLost | Kill | Probe | Start | End


def to_json(message: Mailed) -> dict[str, Any]:
    """Plain values; `from_json` reads them back."""
    return {"kind": type(message).__name__, **asdict(message)}


def from_json(value: dict[str, Any]) -> Mailed:
    """The message that `to_json` wrote."""
    fields = dict(value)
    return _MAILED[fields.pop("kind")](**fields)
