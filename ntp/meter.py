"""Where the time of a step goes, and how much memory it takes, as one worker sees it.

`Meter` stands between the trainer and its watch. On a GPU it marks the stream at every phase and reads the
marks when the device has passed them, so that measuring never waits: what it tells may then be of the step
before. Communication inside a replica is part of `compute`, as is the reading of data; `exchange` and `vote`
are the waits that the backward pass does not hide.
"""

import resource
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntp.protocol import Phase
from ntp.trainer import Watch

_NAMES = {
    Phase.STEP: "compute",
    Phase.EXCHANGE: "exchange",
    Phase.VOTE: "vote",
    Phase.UPDATE: "update",
}
_PLACES = 6
_KEPT = 12  # marks: of two steps, where nobody reads


@dataclass(slots=True)
class _Mark:
    """The begin of a phase: by the clock, and on the device's stream where there is one."""

    phase: Phase
    clock: float
    event: torch.cuda.Event | None

    def seconds_to(self, later: "_Mark") -> float:
        if self.event is None or later.event is None:
            return later.clock - self.clock
        return self.event.elapsed_time(later.event) / 1000

    def is_past(self) -> bool:
        return self.event is None or self.event.query()


@dataclass(slots=True)
class Meter:
    """A watch that measures and passes everything on to `watch`."""

    watch: Watch
    device: torch.device
    _marks: deque[_Mark] = field(default_factory=lambda: deque[_Mark](maxlen=_KEPT))

    def enter(self, phase: Phase, step: int) -> None:
        """See `Watch`."""
        self.watch.enter(phase, step)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(_Mark(phase, time.perf_counter(), event))

    def microbatch(self, step: int, gradients: Tensor) -> None:
        """See `Watch`."""
        self.watch.microbatch(step, gradients)

    def wants_switch(self) -> bool:
        """See `Watch`."""
        return self.watch.wants_switch()

    def read(self) -> dict[str, object]:
        """Seconds by phase since the last reading, and the peak of memory in bytes, as metrics have them."""
        times: dict[str, float] = {}
        while len(self._marks) > 1 and self._marks[1].is_past():
            mark = self._marks.popleft()
            name = _NAMES.get(mark.phase)
            if name is not None:
                times[name] = times.get(name, 0.0) + mark.seconds_to(self._marks[0])
        phases = {name: round(seconds, _PLACES) for name, seconds in times.items()}
        return {"phases_s": phases, "memory_bytes": self._peak()}

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
