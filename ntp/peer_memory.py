"""Memory that the GPUs of one host can address in each other, and counters that order its use.

Copies and signals are operations of a stream: copy engines and the front end do them, no multiprocessor.
Signals are counters in the receiver's memory, written and awaited by streams; they only grow.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

_RELEASED = 1 << 30
"""Above every number that a job can reach."""

_PAGE = 4096


class DeviceStream:
    """Operations of the CUDA driver in a stream; each takes the host about a microsecond."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self._handle = ctypes.c_void_p(stream.cuda_stream)

    def copy(self, target: int, source: int, count: int) -> None:
        """Copy bytes between addresses, each here or at a peer."""
        if count:
            _succeed(_driver().cuMemcpyAsync(target, source, count, self._handle))

    def write(self, address: int, value: int) -> None:
        """Write 32 bits once all that came before is visible to everyone."""
        _succeed(_driver().cuStreamWriteValue32_v2(self._handle, address, value, 0))

    def wait(self, address: int, value: int) -> None:
        """Hold the stream until the 32 bits are at least `value`."""
        at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
        _succeed(_driver().cuStreamWaitValue32_v2(self._handle, address, value, at_least))


class PeerMemory:
    """The same regions in the memory of every rank of a group; made by all of them at once.

    Args:
        sizes: bytes of each region.
        signals: kinds of signals.

    Attributes:
        others: the other ranks of the group, beginning with this one's neighbour, so that no two ranks
            begin with the same one.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, sizes: Sequence[int], signals: int, device: torch.device
    ):
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.others = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self._counters = signals * self.size
        self._offsets = [0]
        for size in (4 * self._counters, *sizes):
            self._offsets.append(self._offsets[-1] + -(-size // _PAGE) * _PAGE)
        self._storage = symmetric_memory.empty(self._offsets[-1], dtype=torch.uint8, device=device)
        self._storage.zero_()
        torch.cuda.current_stream().synchronize()  # nobody signals before everyone has cleared
        self._handle = symmetric_memory.rendezvous(self._storage, process_group)
        self._bases = [int(base) for base in self._handle.buffer_ptrs]
        self._numbers = [0] * signals
        self._releasing = DeviceStream(torch.cuda.Stream(device))

    def view(self, region: int, shape: Sequence[int], dtype: torch.dtype, rank: int | None = None) -> Tensor:
        """A region in the memory of `rank`, by default this one."""
        offset = self._offsets[region + 1] // dtype.itemsize
        return self._handle.get_buffer(self.rank if rank is None else rank, tuple(shape), dtype, offset)

    def address(self, rank: int, region: int) -> int:
        """Where a region of `rank` begins."""
        return self._bases[rank] + self._offsets[region + 1]

    def next_number(self, signal: int) -> int:
        """The number of the next event that `signal` tells of, from 1; the same on all ranks."""
        self._numbers[signal] += 1
        return self._numbers[signal]

    def signal(self, stream: DeviceStream, rank: int, signal: int, number: int) -> None:
        """Tell `rank`, behind the work in `stream`."""
        stream.write(self._counter(rank, signal, self.rank), number)

    def await_signal(self, stream: DeviceStream, rank: int, signal: int, number: int) -> None:
        """Hold `stream` until `rank` has told as much."""
        stream.wait(self._counter(self.rank, signal, rank), number)

    def release(self) -> None:
        """End all waiting on this rank, from another thread: the ranks waited for will never signal."""
        with torch.cuda.device(self._releasing.stream.device):  # a thread begins without a context
            for counter in range(self._counters):
                self._releasing.write(self._bases[self.rank] + 4 * counter, _RELEASED)

    def _counter(self, rank: int, signal: int, of: int) -> int:
        return self._bases[rank] + 4 * (signal * self.size + of)


def _succeed(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"an operation in a CUDA stream failed with driver error {code}")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    address, stream, word = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
    driver.cuMemcpyAsync.argtypes = [address, address, ctypes.c_size_t, stream]
    driver.cuStreamWriteValue32_v2.argtypes = [stream, address, word, ctypes.c_uint]
    driver.cuStreamWaitValue32_v2.argtypes = [stream, address, word, ctypes.c_uint]
    return driver
