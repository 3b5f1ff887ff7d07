"""The way of one rank's state to host memory, beside the steps that follow.

    staging = Staging(optimizer)    # before the first save: pinning gigabytes takes seconds
    copy = staging.copier()         # now: the state to copy is the one that this stream has reached
    copy()                          # in another thread; when it returns the state may change
    write_shards(path, staging.shards)

Host memory is one block per rank, as large as what the rank saves and no larger (PyTorch's own pinned memory
is rounded up to a power of two). It is pinned where there is a GPU, so that a copy engine fills it over PCIe
while kernels run. Copies are cut into pieces and few are queued at a time: what the trainer itself reads from
the device, a loss or a norm, waits for those few instead of for all.

Making the pages takes the longest: one thread needs 4.4 s for 6.4 GB on a machine with an H200, and no step
is slower for it. Four threads need 1.3 s, but beside those of 25.7 GB the steps took 2 s more together.

The first copy into memory that had just been pinned was slow once (two H200, 24.6 GB a rank: 13.7 GB/s, then
47.4 and 47.8), and not slow another time (one H200: 55 GB/s, all three). One is made ahead, when nothing
waits for it.
"""

import logging
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ntp.checkpoint.manifest import ELEMENT_BYTES
from ntp.checkpoint.pieces import KINDS, Shard
from ntp.optim import DistributedOptimizer, Slice
from ntp.parameters import BLOCK

COPY_ELEMENTS = 1 << 24
_QUEUED = 16
"""Copies: some milliseconds of PCIe, in which this thread finds the time to queue more."""
_PINNED_AT_ONCE = 1 << 26
"""Elements, whole copies. Pinning holds locks that launches of kernels want too."""
_log = logging.getLogger(__name__)


class HostMemory:
    """Float32 host memory, pinned for `device` where that is a GPU; given back when nobody has it any more.

    Attributes:
        values: the elements, flat.
    """

    def __init__(self, elements: int, device: torch.device):
        mapping = mmap.mmap(-1, max(1, elements) * ELEMENT_BYTES)
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.values = torch.frombuffer(mapping, dtype=torch.float32)[:elements]
        if elements and device.type == "cuda":
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        runtime = _runtime()
        with torch.cuda.device(device):  # a thread has GPU 0 until it says otherwise
            for part in self.values.split(_PINNED_AT_ONCE):
                part.zero_()  # the pages are there before locks are held
                code = int(runtime.cudaHostRegister(part.data_ptr(), part.numel() * ELEMENT_BYTES, 0))
                if code != 0:
                    _log.warning("host memory for checkpoints is not pinned (CUDA error %d): slower", code)
                    return
                weakref.finalize(self, _unpin, device, part.data_ptr()).atexit = False


def _unpin(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    """CUDA's runtime library: a module without declared types."""
    return torch.cuda.cudart()


class Staging:
    """Host memory for what one rank saves, and the copies into it.

    Attributes:
        shards: what the host memory holds, for `write_shards`.
    """

    def __init__(self, optimizer: DistributedOptimizer):
        self._source = optimizer.flats
        self._device = optimizer.master.device
        parts = [part for part in optimizer.slices if part.counts]
        *places, elements = accumulate(((part.last - part.first) * BLOCK for part in parts), initial=0)
        self._memory = HostMemory(len(KINDS) * elements, self._device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        flats = self._memory.values.view(len(KINDS), elements)
        self.shards = [
            Shard(f"{part.spec.name}.{kind}", part.units, part.start, part.stop, _part_of(flat, part, place))
            for part, place in zip(parts, places, strict=True)
            for kind, flat in zip(KINDS, flats, strict=True)
        ]
        self._copies = [
            (flat[first : first + count], self._memory.values[place : place + count])
            for number, flat in enumerate(self._source)
            for first, place, count in _copies(parts, number * elements)
        ]
        if self._stream is not None:
            self._copy_behind(self._stream)

    def fits(self, optimizer: DistributedOptimizer) -> bool:
        """Whether this is for that optimizer."""
        return self._source[0] is optimizer.master

    def copier(self) -> Callable[[], None]:
        """A function for another thread that copies the state as it is now; it returns when all is copied."""
        stream = self._stream
        if stream is None:
            return self._copy
        committed = torch.cuda.Event()
        committed.record(torch.cuda.current_stream(self._device))

        def copy_behind() -> None:
            stream.wait_event(committed)
            self._copy_behind(stream)

        return copy_behind

    def _copy(self) -> None:
        for source, host in self._copies:
            host.copy_(source)

    def _copy_behind(self, stream: torch.cuda.Stream) -> None:
        queued: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(stream):
            for source, host in self._copies:
                if len(queued) == _QUEUED:
                    queued.popleft().synchronize()
                host.copy_(source, non_blocking=True)
                queued.append(torch.cuda.Event(blocking=True))
                queued[-1].record(stream)
        stream.synchronize()


def _part_of(flat: Tensor, part: Slice, place: int) -> Tensor:
    """The values of a slice, `[units, elements]`, whose blocks begin at `place` of `flat`."""
    blocks = flat[place : place + (part.last - part.first) * BLOCK].view(len(part.units), -1)
    return blocks[:, : part.stop - part.start]


def _copies(parts: Sequence[Slice], place: int) -> Iterator[tuple[int, int, int]]:
    """Where to copy from, where to, and how many elements, for slices whose memory begins at `place`.

    None crosses a multiple of `COPY_ELEMENTS` in host memory, so none crosses from one pinned range to the
    next, which a copy engine does not do.
    """
    for part in parts:
        first, stop = part.first * BLOCK, part.last * BLOCK
        while first < stop:
            count = min(stop - first, COPY_ELEMENTS - place % COPY_ELEMENTS)
            yield first, place, count
            first, place = first + count, place + count
