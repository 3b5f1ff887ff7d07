"""The exchange of cut products between GPUs of one host, on copy engines.

Every rank has its share and its outputs in memory that the others can address. For each part of the tokens a
rank pulls its chunk of rows from every peer, adds and finishes them in one kernel and pushes the result to
every peer. Copies and signals take no multiprocessor, so that matrix products beside them keep nearly all of
their speed (figures: `ntp/DESIGN.md`, "The exchange on GPUs").

Signals are counters in the receiver's memory, written and awaited by the stream itself. A rank writes into a
peer's memory again only after that peer's next signal, which the peer sends after its last reading: the chain
of products orders all reuse. When a peer dies, `release` raises the counters so that nothing waits for it.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ntp.exchange import Backlog, CutExchange, Finish

if TYPE_CHECKING:
    from ntp.collectives import Group

PARTS = 2
"""Parts of the tokens: the exchange of one hides behind the products of the other."""

_LEAST_PART = 1024
"""Fewer tokens in a part would leave multiprocessors idle."""

_SLOTS = 2
_BYTES_PER_SECOND = 180e9  # of a rank's pulls and pushes together, 4 x H100
_FLOPS = 600e12  # of a weight gradient
_COVERED = 0.75  # of an exchange: what is left is cheaper exposed than a gradient that lacks elsewhere
_RELEASED = 1 << 30
_PAGE = 4096


class Signal(IntEnum):
    """What a counter counts: parts whose exponents, share or finished rows are there."""

    EXPONENTS = 0
    SHARE = 1
    OUTPUT = 2


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Rows of an output under way; `held` keeps the tensors alive that the side stream still reads."""

    rows: slice
    event: torch.cuda.Event
    held: tuple[Any, ...]


class PeerExchange(CutExchange):
    """Exchange through the memory of the peers; all ranks of the group are GPUs of one host.

    Args:
        check: called before every exchange; raises where the generation is over.
    """

    def __init__(self, group: "Group", process_group: dist.ProcessGroup, check: Callable[[], None]):
        super().__init__(group)
        self._process_group, self._check = process_group, check
        self._memory: _PeerMemory | None = None
        self._stream = torch.cuda.Stream(priority=-1)
        self._slot = 0
        self._arriving: dict[int, list[_Arrival]] = {}
        self._backlog = Backlog()

    def parts(self, tokens: int) -> Sequence[slice]:
        count = max(1, min(PARTS, tokens // _LEAST_PART))
        edges = [tokens * index // count for index in range(count + 1)]
        return [slice(first, last) for first, last in pairwise(edges)]

    def output(self, like: Tensor) -> Tensor:
        self._check()
        memory = self._memory
        if memory is None or not memory.fits(like):
            torch.cuda.current_stream().synchronize()  # peers may not read what is about to go
            self._memory = memory = _PeerMemory(self._process_group, like)
        self._slot = (self._slot + 1) % _SLOTS
        return memory.output(memory.rank, self._slot)[: like.shape[0]]

    def share(self, output: Tensor, rows: slice) -> Tensor:
        for arrivals in self._arriving.values():
            for arrival in arrivals:
                if rows.start < arrival.rows.stop and arrival.rows.start < rows.stop:
                    arrival.event.wait()
        return self._peers.share(self._peers.rank)[rows]

    def maximum(self, exponents: Tensor, rows: slice) -> Tensor:
        self._check()
        memory = self._peers
        count = memory.count(Signal.EXPONENTS)
        for rank in memory.others():
            memory.exponents(rank)[memory.rank, rows].copy_(exponents, non_blocking=True)
            memory.signal(rank, Signal.EXPONENTS, count)
        everyone = memory.exponents(memory.rank)
        everyone[memory.rank, rows] = exponents
        for rank in memory.others():
            memory.await_signal(rank, Signal.EXPONENTS, count)
        return everyone[:, rows].amax(0)

    def start(self, share: Tensor, rows: slice, output: Tensor, finish: Finish) -> None:
        self._check()
        memory = self._peers
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            count = memory.count(Signal.SHARE)
            for rank in memory.others():
                memory.signal(rank, Signal.SHARE, count)
            chunk = _chunk(rows, memory.rank, memory.size)
            pieces = share.new_empty(memory.size, chunk.stop - chunk.start, share.shape[1])
            pieces[memory.rank] = memory.share(memory.rank)[chunk]
            for rank in memory.others():
                memory.await_signal(rank, Signal.SHARE, count)
                pieces[rank].copy_(memory.share(rank)[chunk], non_blocking=True)
            if pieces.numel():
                finish(pieces, slice(chunk.start - rows.start, chunk.stop - rows.start), output[chunk])
            slot = memory.slot(output)
            for rank in memory.others():
                memory.output(rank, slot)[chunk].copy_(output[chunk], non_blocking=True)
                memory.signal(rank, Signal.OUTPUT, count)
            for rank in memory.others():
                memory.await_signal(rank, Signal.OUTPUT, count)
            event = torch.cuda.Event()
            event.record()
        self._arriving.setdefault(output.data_ptr(), []).append(_Arrival(rows, event, (share, finish)))

    def wait(self, output: Tensor, rows: slice | None = None) -> None:
        arrivals = self._arriving.get(output.data_ptr(), [])
        for arrival in [a for a in arrivals if rows is None or a.rows.start < rows.stop]:
            arrival.event.wait()
            arrivals.remove(arrival)
        if not arrivals:
            self._arriving.pop(output.data_ptr(), None)

    def defer(self, work: Callable[[], None], flops: float) -> None:
        self._backlog.add(work, flops)

    def cover(self, elements: int) -> None:
        size = self._group.size
        seconds = elements * (size - 1) / size * (4 + 2) / _BYTES_PER_SECOND
        self._backlog.run(_COVERED * seconds * _FLOPS)

    def flush(self) -> None:
        self._backlog.run()

    def release(self) -> None:
        if self._memory is not None:
            self._memory.release()

    def close(self) -> None:
        self._memory = None
        self._arriving.clear()
        self._backlog.clear()

    @property
    def _peers(self) -> "_PeerMemory":
        assert self._memory is not None, "a product begins with its output"
        return self._memory


def _chunk(rows: slice, place: int, size: int) -> slice:
    """The rows that one rank adds and finishes."""
    count = rows.stop - rows.start
    return slice(rows.start + count * place // size, rows.start + count * (place + 1) // size)


class _PeerMemory:
    """Memory of all ranks for products [tokens, width] of one dtype; made by all ranks at once.

    In every rank: counters i32 [signals, ranks], exponents i32 [ranks, tokens], the share i32 [tokens,
    width], and the outputs.
    """

    def __init__(self, process_group: dist.ProcessGroup, like: Tensor):
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._tokens, self._width, self._dtype = *like.shape, like.dtype
        sizes = [4 * len(Signal) * self.size, 4 * self.size * self._tokens, 4 * like.numel()]
        sizes += [like.element_size() * like.numel()] * _SLOTS
        self._offsets = [0]
        for size in sizes:
            self._offsets.append(self._offsets[-1] + -(-size // _PAGE) * _PAGE)
        self._storage = symmetric_memory.empty(self._offsets[-1], dtype=torch.uint8, device=like.device)
        self._storage.zero_()
        torch.cuda.current_stream().synchronize()  # nobody signals before everyone has cleared
        self._handle = symmetric_memory.rendezvous(self._storage, process_group)
        self._views: dict[tuple[int, int], Tensor] = {}
        self._counts = dict.fromkeys(Signal, 0)

    def fits(self, like: Tensor) -> bool:
        """Whether a product like this one has room."""
        return like.shape[1] == self._width and like.dtype == self._dtype and like.shape[0] <= self._tokens

    def others(self) -> Sequence[int]:
        """The other ranks, each rank beginning with its neighbour, so that no two copy from the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def exponents(self, rank: int) -> Tensor:
        """i32 [ranks, tokens] in the memory of `rank`."""
        return self._view(rank, 1, (self.size, self._tokens), torch.int32)

    def share(self, rank: int) -> Tensor:
        """i32 [tokens, width] in the memory of `rank`."""
        return self._view(rank, 2, (self._tokens, self._width), torch.int32)

    def output(self, rank: int, slot: int) -> Tensor:
        """[tokens, width] in the memory of `rank`."""
        return self._view(rank, 3 + slot, (self._tokens, self._width), self._dtype)

    def slot(self, output: Tensor) -> int:
        """Which output of this rank that is."""
        addresses = [self.output(self.rank, slot).data_ptr() for slot in range(_SLOTS)]
        return addresses.index(output.data_ptr())

    def count(self, signal: Signal) -> int:
        """The number of the next part."""
        self._counts[signal] += 1
        return self._counts[signal]

    def signal(self, rank: int, signal: Signal, count: int) -> None:
        """Tell `rank`, behind the work in the current stream."""
        _write_value(self._counter(rank, signal, self.rank), count)

    def await_signal(self, rank: int, signal: Signal, count: int) -> None:
        """Hold the current stream until `rank` has told as much."""
        _wait_value(self._counter(self.rank, signal, rank), count)

    def release(self) -> None:
        """End every waiting."""
        counters = self._view(self.rank, 0, (len(Signal) * self.size,), torch.int32)
        with torch.cuda.stream(torch.cuda.Stream(counters.device)):
            counters.fill_(_RELEASED)

    def _counter(self, rank: int, signal: Signal, of: int) -> int:
        return int(self._handle.buffer_ptrs[rank]) + 4 * (signal * self.size + of)

    def _view(self, rank: int, region: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        view = self._views.get((rank, region))
        if view is None:
            offset = self._offsets[region] // dtype.itemsize
            view = self._views[rank, region] = self._handle.get_buffer(rank, shape, dtype, offset)
        return view


def _write_value(address: int, value: int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _succeed(_driver().cuStreamWriteValue32_v2(stream, ctypes.c_uint64(address), ctypes.c_uint32(value), 0))


def _wait_value(address: int, value: int) -> None:
    at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _succeed(
        _driver().cuStreamWaitValue32_v2(stream, ctypes.c_uint64(address), ctypes.c_uint32(value), at_least)
    )


def _succeed(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"CUDA stream memory operation failed with driver error {code}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
