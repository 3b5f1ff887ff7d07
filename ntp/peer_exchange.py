"""The exchange of cut products between GPUs of one host, on copy engines.

Every rank has its share and its outputs in memory that the others can address. For each part of the tokens a
rank pulls its chunk of rows from every peer, adds and finishes them in one kernel and pushes the result to
every peer. Copies and signals take no multiprocessor, so that matrix products beside them keep nearly all of
their speed (figures: `ntp/DESIGN.md`, "The exchange on GPUs").

A rank writes into a peer's memory again only after that peer's next signal, which the peer sends after its
last reading: the chain of products orders all reuse. When a peer dies, `release` ends all waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ntp.exchange import Backlog, CutExchange, Finish
from ntp.peer_memory import DeviceStream, PeerMemory

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


class _Signal(IntEnum):
    """What a counter counts: parts whose norms, share or finished rows are there."""

    NORMS = 0
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
        self._products: _Products | None = None
        self._norms: _Norms | None = None
        self._side = DeviceStream(torch.cuda.Stream(priority=-1))
        self._arriving: dict[int, list[_Arrival]] = {}
        self._backlog = Backlog()

    def parts(self, tokens: int) -> Sequence[slice]:
        count = max(1, min(PARTS, tokens // _LEAST_PART))
        edges = [tokens * index // count for index in range(count + 1)]
        return [slice(first, last) for first, last in pairwise(edges)]

    def output(self, like: Tensor) -> Tensor:
        self._check()
        if self._products is None or not self._products.fits(like):
            torch.cuda.current_stream().synchronize()  # what is about to go has been read
            self._products = _Products(self._process_group, like)
        return self._products.next_output(like.shape[0])

    def share(self, output: Tensor, rows: slice) -> Tensor:
        for arrivals in self._arriving.values():
            for arrival in arrivals:
                if rows.start < arrival.rows.stop and arrival.rows.start < rows.stop:
                    arrival.event.wait()
        return self._open_products.share[rows]

    def gather(self, norms: Tensor, total_units: int, first_unit: int) -> Tensor:
        self._check()
        elements = total_units * norms.shape[1]
        if self._norms is None or elements > self._norms.capacity:
            torch.cuda.current_stream().synchronize()
            self._norms = _Norms(self._process_group, elements, norms.device)
        return self._norms.gather(norms, total_units, first_unit)

    def start(self, share: Tensor, rows: slice, output: Tensor, finish: Finish) -> None:
        self._check()
        side, products = self._side, self._open_products
        side.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side.stream):
            products.exchange(side, rows, output, finish)
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
        for memory in (self._products, self._norms):
            if memory is not None:
                memory.memory.release()

    def close(self) -> None:
        self._products = self._norms = None
        self._arriving.clear()
        self._backlog.clear()

    @property
    def _open_products(self) -> "_Products":
        assert self._products is not None, "a product begins with its output"
        return self._products


class _Products:
    """Shares and outputs of all ranks for products [tokens, width] of one dtype; all make it at once."""

    def __init__(self, process_group: dist.ProcessGroup, like: Tensor):
        self._tokens, self._width = like.shape
        share, output = 4 * like.numel(), like.element_size() * like.numel()
        self.memory = PeerMemory(process_group, [share] + [output] * _SLOTS, len(_Signal), like.device)
        self.share = self.memory.view(0, like.shape, torch.int32)
        self._outputs = [self.memory.view(1 + slot, like.shape, like.dtype) for slot in range(_SLOTS)]
        self._next = 0

    def fits(self, like: Tensor) -> bool:
        """Whether a product like this one has room."""
        mine = self._outputs[0]
        return like.dtype == mine.dtype and like.shape[1] == self._width and like.shape[0] <= self._tokens

    def next_output(self, tokens: int) -> Tensor:
        """The storage whose last use is longest ago."""
        self._next = (self._next + 1) % _SLOTS
        return self._outputs[self._next][:tokens]

    def exchange(self, side: DeviceStream, rows: slice, output: Tensor, finish: Finish) -> None:
        """Add and finish these rows of all ranks, in `output` of all ranks, in the stream `side`."""
        memory = self.memory
        number = memory.next_number(_Signal.SHARE)
        for rank in memory.others:
            memory.signal(side, rank, _Signal.SHARE, number)
        chunk = _chunk(rows, memory.rank, memory.size)
        count = chunk.stop - chunk.start
        pieces = torch.empty(memory.size, count, self._width, dtype=torch.int32, device=output.device)
        width, bytes_of_piece = 4 * self._width, 4 * self._width * count
        for place, rank in enumerate((memory.rank, *memory.others)):
            if rank != memory.rank:
                memory.await_signal(side, rank, _Signal.SHARE, number)
            source = memory.address(rank, 0) + chunk.start * width
            side.copy(pieces.data_ptr() + place * bytes_of_piece, source, bytes_of_piece)
        if count:
            finish(pieces, slice(chunk.start - rows.start, chunk.stop - rows.start), output[chunk])
        region = 1 + next(s for s, mine in enumerate(self._outputs) if mine.data_ptr() == output.data_ptr())
        width = output.element_size() * self._width
        for rank in memory.others:
            first = chunk.start * width
            side.copy(memory.address(rank, region) + first, output.data_ptr() + first, count * width)
            memory.signal(side, rank, _Signal.OUTPUT, number)
        for rank in memory.others:
            memory.await_signal(side, rank, _Signal.OUTPUT, number)


class _Norms:
    """The norms of all units in the memory of every rank, f32, by turns in two regions.

    A rank sends the next norms only after it has got these from everyone, so never two ahead of a reader.
    """

    def __init__(self, process_group: dist.ProcessGroup, capacity: int, device: torch.device):
        self.capacity = capacity
        self.memory = PeerMemory(process_group, [4 * capacity] * 2, len(_Signal), device)
        self._regions = [self.memory.view(region, (capacity,), torch.float32) for region in range(2)]

    def gather(self, norms: Tensor, total_units: int, first_unit: int) -> Tensor:
        """See `CutExchange.gather`; in the current stream."""
        memory, stream = self.memory, DeviceStream(torch.cuda.current_stream())
        number, tokens = memory.next_number(_Signal.NORMS), norms.shape[1]
        region, first = number % 2, 4 * first_unit * tokens
        for rank in (memory.rank, *memory.others):
            stream.copy(memory.address(rank, region) + first, norms.data_ptr(), 4 * norms.numel())
            if rank != memory.rank:
                memory.signal(stream, rank, _Signal.NORMS, number)
        for rank in memory.others:
            memory.await_signal(stream, rank, _Signal.NORMS, number)
        return self._regions[region][: total_units * tokens].view(total_units, tokens)


def _chunk(rows: slice, place: int, size: int) -> slice:
    """The rows that one rank adds and finishes."""
    count = rows.stop - rows.start
    return slice(rows.start + count * place // size, rows.start + count * (place + 1) // size)
