"""Faults as data, and the watch that makes them happen in a worker.

A configuration's `faults` lists them, one kind each:

    faults:
      - kill: {rank: 3, step: 7}
      - stop: {rank: 0, step: 2, phase: vote}
      - nan: {rank: 1, step: 4}

A fault happens once: to the first process of its rank, when it enters that phase of that step.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from ntp.protocol import Phase
from ntp.section import Count, Section

if TYPE_CHECKING:
    from torch import Tensor

    from ntp.control import Control


class FaultPlace(Section):
    """Where a fault happens: when process `rank` enters `phase` of step `step`."""

    rank: Count
    step: Count
    phase: Phase = Phase.STEP


class Fault(Section):
    """One fault; exactly one kind is given.

    Attributes:
        kill, segfault, terminate, stop: the signals SIGKILL, SIGSEGV, SIGTERM, SIGSTOP (a hang).
        exit: the process ends with code 0 in mid-run.
        exception: an exception in the worker's own code.
        out_of_memory: the allocation error of the device or the host.
        nan: a NaN is written into the gradient buffer, in the first microbatch of the step.
    """

    kill: FaultPlace | None = None
    segfault: FaultPlace | None = None
    terminate: FaultPlace | None = None
    stop: FaultPlace | None = None
    exit: FaultPlace | None = None
    exception: FaultPlace | None = None
    out_of_memory: FaultPlace | None = None
    nan: FaultPlace | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a fault has one kind, found {given or 'none'}")
        return self

    @property
    def kind(self) -> str:
        """The kind that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def place(self) -> FaultPlace:
        """Where it happens."""
        place = getattr(self, self.kind)
        assert isinstance(place, FaultPlace)
        return place


class InjectedError(Exception):
    """The exception of an `exception` fault."""


class FaultyWatch:
    """Passes everything on to the control store, and makes one rank's faults happen on the way."""

    def __init__(self, control: "Control", faults: Sequence[Fault], rank: int):
        self._control = control
        self._due = [fault for fault in faults if fault.place.rank == rank]

    def enter(self, phase: Phase, step: int) -> None:
        """Tells the store, then dies, hangs or raises if that is due at this place."""
        self._control.enter(phase, step)
        for fault in self._take(phase, step, of_gradients=False):
            _ACTIONS[fault.kind]()

    def microbatch(self, step: int, gradients: "Tensor") -> None:
        """Tells the store, then writes a NaN into `gradients` (flat, float32) if that is due."""
        self._control.microbatch(step, gradients)
        for _ in self._take(Phase.STEP, step, of_gradients=True):
            gradients[0] = float("nan")

    def wants_switch(self) -> bool:
        """As the store says."""
        return self._control.wants_switch()

    def _take(self, phase: Phase, step: int, of_gradients: bool) -> list[Fault]:
        taken = [
            fault
            for fault in self._due
            if (fault.place.phase, fault.place.step) == (phase, step)
            and (fault.kind == "nan") is of_gradients
        ]
        self._due = [fault for fault in self._due if fault not in taken]
        return taken


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _segfault() -> None:
    ctypes.string_at(0)


def _raise() -> None:
    raise InjectedError("an exception was asked for")


def _out_of_memory() -> None:
    raise MemoryError("an allocation failure was asked for")


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
}
