"""The exchange of cut products between GPUs of one host, through each other's memory.

Of each part of the tokens every rank owns a chunk of rows. The products of a chunk write their integers
straight into the owner's memory; the owner adds and finishes them in one kernel, and copy engines push the
result to every peer. What travels with the products costs them little, and copies take no multiprocessor
(figures: `ntp/DESIGN.md`, "The exchange on GPUs").

A rank writes into a peer's memory again only after that peer's next signal, which the peer sends after its
last reading: the chain of products orders all reuse. When a peer dies, `release` ends all waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from ntp_kernels.remote import broadcast
from torch import Tensor

from ntp.exchange import Backlog, CutExchange, Finish, Share
from ntp.pace import Pace
from ntp.peer_memory import DeviceStream, PeerMemory

if TYPE_CHECKING:
    from ntp.collectives import Group

PARTS = 2
"""Parts of the tokens: the exchange of one hides behind the products of the other."""

_LEAST_PART = 1024
"""Fewer tokens in a part would leave multiprocessors idle."""

_ROWS = 128
"""Chunks are whole tiles of the products."""

_SLOTS = 2
_REGIONS = PARTS + 1
_BYTES_PER_SECOND = 200e9  # of a rank's pushes, 4 x H100
_FLOPS = 600e12  # of a weight gradient
_COVERED = 0.75  # of an exchange: what is left is cheaper exposed than a gradient that lacks elsewhere

_AHEAD = 24
"""Products that the host may be ahead of the device (`ntp.pace`)."""


class _Signal(IntEnum):
    """What is there of a part."""

    SHARES = 0
    OUTPUT = 1


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Rows of an output under way; `held` keeps the tensors alive that the side stream still reads."""

    rows: slice
    event: torch.cuda.Event
    held: Any


class PeerExchange(CutExchange):
    """Exchange through the memory of the peers; all ranks of the group are GPUs of one host.

    Args:
        check: called before every exchange; raises where the generation is over.
    """

    def __init__(self, group: "Group", check: Callable[[], None]):
        super().__init__(group)
        self._check = check
        self._products: _Products | None = None
        self._units: _Units | None = None
        self._side = torch.cuda.Stream(priority=-1)
        self._arriving: dict[int, list[_Arrival]] = {}
        self._pace = Pace(_AHEAD)
        self._backlog = Backlog()

    def parts(self, tokens: int) -> Sequence[slice]:
        """See `CutExchange`."""
        whole = _ROWS * self._group.size
        count = max(1, min(PARTS, tokens // _LEAST_PART))
        edges = [tokens * index // count // whole * whole for index in range(count)]
        return [slice(first, last) for first, last in pairwise([*edges, tokens])]

    def output(self, like: Tensor) -> Tensor:
        """See `CutExchange`."""
        self._check()
        if self._products is None or not self._products.fits(like):
            if self._products is not None:
                self._products.memory.close()
            self._products = _Products(self._group, like)
            self.places += 1
        return self._products.next_output(like.shape[0])

    def shares(self, output: Tensor, rows: slice) -> Sequence[Share]:
        """See `CutExchange`."""
        for arrivals in self._arriving.values():
            for arrival in arrivals:
                if rows.start < arrival.rows.stop and arrival.rows.start < rows.stop:
                    arrival.event.wait()
        return self._open_products.shares(rows)

    def gather(self, local: Tensor, total_units: int, first_unit: int, rows: slice | None = None) -> Tensor:
        """See `CutExchange`."""
        self._check()
        elements = total_units * local.shape[1]
        if self._units is None or elements > self._units.capacity:
            if self._units is not None:
                self._units.memory.close()
            self._units = _Units(self._group, elements, local.device)
            self.places += 1
        region = PARTS if rows is None else int(rows.start > 0)
        return self._units.gather(local, total_units, first_unit, region)

    def start(self, shares: Sequence[Share], output: Tensor, finish: Finish) -> None:
        """See `CutExchange`."""
        self._check()
        rows = slice(min(share.rows.start for share in shares), max(share.rows.stop for share in shares))
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._open_products.exchange(rows, output, finish)
            event = torch.cuda.Event()
            event.record()
        self._arriving.setdefault(output.data_ptr(), []).append(_Arrival(rows, event, finish))
        if not torch.cuda.is_current_stream_capturing():
            self._pace.keep(event)

    def wait(self, output: Tensor, rows: slice | None = None) -> None:
        """See `CutExchange`."""
        arrivals = self._arriving.get(output.data_ptr(), [])
        for arrival in [a for a in arrivals if rows is None or a.rows.start < rows.stop]:
            arrival.event.wait()
            arrivals.remove(arrival)
        if not arrivals:
            self._arriving.pop(output.data_ptr(), None)

    def defer(self, work: Callable[[], None], flops: float) -> None:
        """See `CutExchange`."""
        self._backlog.add(work, flops)

    def cover(self, elements: int) -> None:
        """See `CutExchange`."""
        size = self._group.size
        seconds = 2 * elements * (size - 1) / size / _BYTES_PER_SECOND
        self._backlog.run(_COVERED * seconds * _FLOPS)

    def flush(self) -> None:
        """See `CutExchange`."""
        self._backlog.run()

    @property
    def can_be_captured(self) -> bool:
        """See `CutExchange`."""
        return True

    def release(self) -> None:
        """See `CutExchange`."""
        for memory in self._memories():
            memory.release()

    def close(self) -> None:
        """See `CutExchange`."""
        self.release()
        for memory in self._memories():
            memory.close()
        self._products = self._units = None
        self._arriving.clear()
        self._pace.clear()
        self._backlog.clear()

    def _memories(self) -> list[PeerMemory]:
        return [owner.memory for owner in (self._products, self._units) if owner is not None]

    @property
    def _open_products(self) -> "_Products":
        assert self._products is not None, "a product begins with its output"
        return self._products


class _Products:
    """Shares and outputs of all ranks for products [tokens, width] of one dtype; all make it at once.

    The shares of a chunk lie at its owner, rank after rank, from the row where the part begins.
    """

    def __init__(self, group: "Group", like: Tensor):
        self._tokens, self._width = like.shape
        shape = (self._tokens + _ROWS * group.size, self._width)
        shares, output = 4 * shape[0] * self._width, like.element_size() * like.numel()
        self.memory = memory = PeerMemory(group, [shares] + [output] * _SLOTS, len(_Signal), like.device)
        slots = range(1, 1 + _SLOTS)
        self._outputs = [memory.view(slot, like.shape, like.dtype, memory.rank) for slot in slots]
        self._shares = [memory.view(0, shape, torch.int32, rank) for rank in range(memory.size)]
        self._lanes = [DeviceStream(torch.cuda.Stream(priority=-1)) for _ in self.memory.others]
        self._next = 0

    def fits(self, like: Tensor) -> bool:
        """Whether a product like this one has room."""
        mine = self._outputs[0]
        return like.dtype == mine.dtype and like.shape[1] == self._width and like.shape[0] <= self._tokens

    def next_output(self, tokens: int) -> Tensor:
        """The storage whose last use is longest ago."""
        self._next = (self._next + 1) % _SLOTS
        return self._outputs[self._next][:tokens]

    def shares(self, rows: slice) -> list[Share]:
        """Where this rank's share of every chunk goes; its own chunk last, so that the others travel."""
        memory, found = self.memory, list[Share]()
        for owner in (*memory.others, memory.rank):
            chunk, room = _chunk(rows, owner, memory.size)
            first = rows.start + memory.rank * room
            if chunk.start < chunk.stop:
                found.append(Share(chunk, self._shares[owner][first : first + chunk.stop - chunk.start]))
        return found

    def exchange(self, rows: slice, output: Tensor, finish: Finish) -> None:
        """Add and finish these rows of all ranks, in `output` of all ranks, in the current stream."""
        memory, side = self.memory, torch.cuda.current_stream()
        memory.signal(_Signal.SHARES)
        memory.await_signals(_Signal.SHARES)
        chunk, room = _chunk(rows, memory.rank, memory.size)
        count = chunk.stop - chunk.start
        if count:
            pieces = self._shares[memory.rank][rows.start : rows.start + memory.size * room]
            finish(pieces.view(memory.size, room, self._width)[:, :count], chunk, output[chunk])
        region = 1 + next(s for s, mine in enumerate(self._outputs) if mine.data_ptr() == output.data_ptr())
        width = output.element_size() * self._width
        first = chunk.start * width
        for place, (lane, rank) in enumerate(zip(self._lanes, memory.others, strict=True)):
            lane.stream.wait_stream(side)
            lane.copy(memory.address(rank, region) + first, output.data_ptr() + first, count * width)
            with torch.cuda.stream(lane.stream):
                memory.signal(_Signal.OUTPUT, place)
            side.wait_stream(lane.stream)
        memory.await_signals(_Signal.OUTPUT)


class _Units:
    """What all units have, in the memory of every rank, f32.

    Each part of the tokens has a region for the norms of its rows, whatever else is gathered another: between
    two uses of a region there is always a product, or another part, that all ranks have waited for.
    """

    def __init__(self, group: "Group", capacity: int, device: torch.device):
        self.capacity = capacity
        self.memory = memory = PeerMemory(group, [4 * capacity] * _REGIONS, _REGIONS, device)
        regions = range(_REGIONS)
        self._regions = [memory.view(region, (capacity,), torch.float32, memory.rank) for region in regions]
        ranks = range(memory.size)
        addresses = [[memory.address(rank, region) for rank in ranks] for region in regions]
        self._addresses = torch.tensor(addresses, device=device)

    def gather(self, local: Tensor, total_units: int, first_unit: int, region: int) -> Tensor:
        """See `CutExchange.gather`; in the current stream."""
        width = local.shape[1]
        broadcast(local, self._addresses[region], first_unit * width)
        self.memory.signal(region)
        self.memory.await_signals(region)
        return self._regions[region][: total_units * width].view(total_units, width)


def _chunk(rows: slice, owner: int, size: int) -> tuple[slice, int]:
    """The rows that a rank adds and finishes, and the room for them: that of the largest chunk."""
    room = -(-(rows.stop - rows.start) // (size * _ROWS)) * _ROWS
    first, last = (min(rows.start + place * room, rows.stop) for place in (owner, owner + 1))
    return slice(first, last), room
