"""Why a job ended: from the exits of its workers to the first real cause, in one line. Pure functions.

When one worker dies, the others soon report broken connections, and often their exits are seen first. So the
cause is chosen by kind, not by time: a death by signal, then an error of a worker's own, then an exit with
code 0 while others still needed the worker, and only then a report about a connection. Time breaks ties.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

_ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Fault|Killed)\b")
_LOST_STATE = "UnrecoverableLossError"  # what workers say when nobody has a part of the state any more
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")  # torch puts it before every line of a traceback
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|connectionreset|broken pipe|closed by peer|"
    r"timed out waiting|wait timeout|socket (timeout|closed)|remote process exited|"
    r"(nccl|gloo).*(remote error|unhandled system error|peer)|"
    r"failed to (recv|send)|recvvalue|sendbytes|recvbytes|"
    r"dist(network|store|backend)error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Exit:
    """One worker's end.

    Attributes:
        rank: base-mesh rank.
        code: exit code; negative = killed by that signal.
        error: the last error line of its stderr, or "".
        order: how many exits this agent had seen before.
    """

    rank: int
    code: int
    error: str = ""
    order: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another node's agent: `Exit(**value)` reads them back."""
        return asdict(self)


class ExitCode(IntEnum):
    """How the launcher ends; 128 + n means that signal n stopped it."""

    DONE = 0
    FAILED = 1  # a worker's own error, or any death where losses are not survived
    BAD_INPUT = 2
    UNRECOVERABLE = 3  # what is left of the mesh cannot go on
    NO_PROGRESS = 4  # one loss after another without a committed step
    LOST_STORE = 5  # the control store is gone, or out of reach


class Kind(IntEnum):
    """Kinds of exit, the likeliest cause first."""

    SIGNAL = 0
    ERROR = 1
    EARLY_SUCCESS = 2
    LOST_PEER = 3


def kind_of(exit: Exit) -> Kind:
    """The kind of an exit in a job that failed."""
    if exit.code == 0:
        return Kind.EARLY_SUCCESS
    if exit.code in (-signal.SIGABRT, *range(1, 256)):  # a communication watchdog ends its process by abort
        lost_peer = _LOST_PEER.search(exit.error)
        return Kind.LOST_PEER if lost_peer else Kind.SIGNAL if exit.code < 0 else Kind.ERROR
    return Kind.SIGNAL


def first_cause(exits: Iterable[Exit]) -> Exit | None:
    """The exit that most likely made the others fail; None when there is no failed exit."""
    ordered = sorted(exits, key=lambda exit: (kind_of(exit), exit.order, exit.rank))
    return ordered[0] if any(exit.code for exit in ordered) else None


def describe(exit: Exit) -> str:
    """One line: rank, exit code or signal, last error line."""
    if exit.code < 0:
        return f"rank {exit.rank} was killed by {_signal_name(-exit.code)}"
    if exit.code == 0:
        return f"rank {exit.rank} exited with code 0 before the end of the run"
    said = f": {exit.error}" if exit.error else " and wrote no error"
    return f"rank {exit.rank} exited with code {exit.code}{said}"


def explain(exits: Iterable[Exit], notes: Sequence[str] = (), silent: int = 0) -> str:
    """The reason for a failure in one line, "" when nothing is known.

    `notes` are what agents have to say of themselves (stopped by a signal) and come before what their workers
    suffered from it; `silent` counts agents that say nothing any more.
    """
    cause = first_cause(exits)
    reason = notes[0] if notes else describe(cause) if cause else ""
    if reason and silent:
        return f"{reason} ({silent} other agent{'s' if silent > 1 else ''} gone without a word)"
    return reason


def last_error_line(lines: Sequence[str], limit: int = 300) -> str:
    """The line that names an error at the end of a stderr log, else its last line, cut to `limit` letters."""
    spoken = [_RANK_PREFIX.sub("", line).rstrip() for line in lines if line.strip()]
    # An indented line is source text; in a chain of exceptions the last one is where the traceback ends.
    errors = [line for line in spoken if _ERROR_LINE.match(line)]
    line = (errors or spoken or [""])[-1].strip()
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _signal_name(number: int) -> str:
    names = {s.value: s.name for s in signal.Signals}
    return names.get(number, f"signal {number}")


def why_none_is_left(exits: Sequence[Exit], notes: Sequence[str], cause: str) -> tuple[ExitCode, str]:
    """How a job ends that has no rank left: by the program itself, or by what happened to it, the `cause`."""
    first = first_cause(exits) or exits[0]
    own = kind_of(first) in (Kind.ERROR, Kind.EARLY_SUCCESS) and _LOST_STATE not in first.error
    if own and not notes:
        return ExitCode.FAILED, describe(first)
    return ExitCode.UNRECOVERABLE, cause
