"""How long a device worked on something, and how much room it has left; neither waits for the device."""

import time

import torch

_PLENTY = 1 << 20
"""Buffers that host memory has room for, as far as is asked here."""
_SHARE = 2
"""Of a GPU's free memory, the part that new buffers may take is one in so many: graphs need some too."""


class Stopwatch:
    """Times what is launched between `start` and `stop`: on a GPU between two marks on the current stream."""

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        self._clock = [0, 0]
        self._has_run = False

    def start(self) -> None:
        """Begin anew."""
        self._mark(0)

    def stop(self) -> None:
        """End."""
        self._mark(1)
        self._has_run = True

    def microseconds(self) -> int:
        """Between the last start and stop, 0 before those. A GPU must have passed both."""
        if not self._has_run:
            return 0
        if self._marks:
            begin, end = self._marks
            return round(begin.elapsed_time(end) * 1000)
        return (self._clock[1] - self._clock[0]) // 1000

    def _mark(self, place: int) -> None:
        if self._marks:
            self._marks[place].record()
        else:
            self._clock[place] = time.perf_counter_ns()


def spare(device: torch.device, size: int) -> int:
    """How many buffers of `size` bytes the device has room for beside what its allocator holds."""
    if device.type != "cuda":
        return _PLENTY
    free, _ = torch.cuda.mem_get_info(device)
    return free // _SHARE // max(1, size)
