"""Faults as data.

A configuration's `faults` lists them, one kind each:

    faults:
      - kill: {rank: 3, step: 7}
      - stop: {rank: 0, step: 2, phase: vote}
      - exception: {rank: 2, step: 4, phase: backward}
      - nan: {rank: 1, step: 4}

A fault happens once, and once more after `--max-restarts` has restarted all workers: to the first process of
its rank, when it enters that phase of that step or is in the midst of that part of it. `ntp.injector` makes
it happen.
"""

from enum import StrEnum
from typing import Self

from pydantic import model_validator

from ntp.protocol import Phase
from ntp.section import Count, Section


class Part(StrEnum):
    """A part of a step in the midst of which a fault can happen, when its first call has been made."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"  # with some of the state updated
    WRITER = "writer"  # of a checkpoint, in the thread that saves; what it has written is not yet published


_OF_STEP_0 = (Phase.STARTUP, Phase.WAITING, Phase.MOVING, Phase.FINISHING)


class FaultPlace(Section):
    """Where a fault happens: in `phase` of step `step` of process `rank`.

    `startup` and the first `waiting` are of step 0, the `moving` of a recovery is of the last committed step.
    """

    rank: Count
    step: Count
    phase: Phase | Part = Phase.STEP

    @model_validator(mode="after")
    def _is_come_to(self) -> Self:
        if self.step == 0 and self.phase not in _OF_STEP_0:
            raise ValueError(f"steps count from 1, found step=0 with phase={self.phase}")
        if self.step > 0 and self.phase is Phase.STARTUP:
            raise ValueError(f"phase startup is of step 0, found step={self.step}")
        return self


class Fault(Section):
    """One fault; exactly one kind is given.

    Attributes:
        kill, segfault, terminate, stop: the signals SIGKILL, SIGSEGV, SIGTERM, SIGSTOP (a hang).
        exit: the process ends with code 0 in mid-run.
        exception: an exception in the worker's own code.
        out_of_memory: the allocation error of the device or the host.
        disconnect: its connections to its peers break, and nobody dies.
        nan: a NaN is written into the gradient buffer, in the first microbatch of the step.
    """

    kill: FaultPlace | None = None
    segfault: FaultPlace | None = None
    terminate: FaultPlace | None = None
    stop: FaultPlace | None = None
    exit: FaultPlace | None = None
    exception: FaultPlace | None = None
    out_of_memory: FaultPlace | None = None
    disconnect: FaultPlace | None = None
    nan: FaultPlace | None = None

    @classmethod
    def of(cls, kind: str, rank: int, step: int, phase: str = Phase.STEP) -> Self:
        """A fault of this kind there, as in `Fault.of("kill", rank=3, step=7, phase="exchange")`."""
        return cls.model_validate({kind: {"rank": rank, "step": step, "phase": phase}}, strict=False)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a fault has one kind, found {given or 'none'}")
        if self.nan is not None and self.nan.phase is not Phase.STEP:
            raise ValueError(f"a nan happens in phase step, found {self.nan.phase}")
        if self.disconnect is not None and self.disconnect.phase is Part.OPTIMIZER:
            raise ValueError("a disconnect cannot happen in the optimizer, which talks to nobody")
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
