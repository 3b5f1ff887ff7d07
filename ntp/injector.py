"""Makes the faults of a configuration (`ntp.faults`) happen in a worker; it says so on stderr first."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import ntp.checkpoint.save
from ntp import ops
from ntp.collectives import PeerLostError
from ntp.control import Control
from ntp.faults import Fault, Part
from ntp.layers import FeedForward
from ntp.protocol import Phase
from ntp.trainer import Trainer

_PARTS: dict[Part, tuple[Phase, Any, str]] = {
    Part.DATA: (Phase.STEP, Trainer, "batch"),
    Part.FORWARD: (Phase.STEP, FeedForward, "__call__"),
    Part.BACKWARD: (Phase.STEP, ops._FeedForward, "backward"),
    Part.OPTIMIZER: (Phase.UPDATE, ops, "adamw"),
    Part.WRITER: (Phase.CHECKPOINT, ntp.checkpoint.save, "write_shards"),
}
"""The phase in which a part runs, and a function of it, as its owner and name."""


ANNOUNCED = "injected fault:"


class InjectedError(Exception):
    """The exception of an `exception` fault."""


class FaultyWatch:
    """Passes everything on to the control store, and makes one rank's faults happen on the way."""

    def __init__(self, control: Control, faults: Sequence[Fault], rank: int):
        self._control = control
        self._due = [fault for fault in faults if fault.place.rank == rank]

    def enter(self, phase: Phase, step: int) -> None:
        """See `ntp.trainer.Watch`."""
        self._control.enter(phase, step)
        for part, (begins_in, owner, name) in _PARTS.items():
            for fault in self._take(part, step) if phase is begins_in else ():
                _set_trap(owner, name, fault)
        for fault in self._take(phase, step):
            _strike(fault)

    def microbatch(self, step: int, gradients: Tensor) -> None:
        """See `ntp.trainer.Watch`."""
        self._control.microbatch(step, gradients)
        for fault in self._take(Phase.STEP, step, of_gradients=True):
            _say(fault)
            gradients[0] = float("nan")

    def wants_switch(self) -> bool:
        """See `ntp.trainer.Watch`."""
        return self._control.wants_switch()

    def _take(self, phase: Phase | Part, step: int, of_gradients: bool = False) -> list[Fault]:
        taken = [
            fault
            for fault in self._due
            if (fault.place.phase, fault.place.step) == (phase, step)
            and (fault.kind == "nan") is of_gradients
        ]
        self._due = [fault for fault in self._due if fault not in taken]
        return taken


def _set_trap(owner: Any, name: str, fault: Fault) -> None:
    """Makes a fault happen right after the next call of a function; the calls after that are as before."""
    real = getattr(owner, name)

    def trapped(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        result = real(*args, **kwargs)
        _strike(fault)
        return result

    setattr(owner, name, trapped)


def _strike(fault: Fault) -> None:
    _say(fault)
    _ACTIONS[fault.kind]()


def _say(fault: Fault) -> None:
    sys.stderr.write(f"{ANNOUNCED} {fault.kind} in {fault.place.phase} of step {fault.place.step}\n")
    sys.stderr.flush()


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _segfault() -> None:
    ctypes.string_at(0)


def _raise() -> None:
    raise InjectedError("an exception was asked for")


def _out_of_memory() -> None:
    raise MemoryError("an allocation failure was asked for")


def _disconnect() -> None:
    raise PeerLostError("a broken connection was asked for")


def _exit() -> None:
    sys.stdout.flush()
    os._exit(0)


_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _send(signal.SIGKILL),
    "segfault": _segfault,
    "terminate": _send(signal.SIGTERM),
    "stop": _send(signal.SIGSTOP),
    "exit": _exit,
    "exception": _raise,
    "out_of_memory": _out_of_memory,
    "disconnect": _disconnect,
}
