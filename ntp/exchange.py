"""How the ranks of a replica add their shares of a cut product, and what they compute meanwhile.

A cut product is [tokens, width]: every rank has an int32 share of each element, `finish` makes a number of
the sum. A caller takes the tokens in `parts`: while one part travels, the next is computed. In backward,
weight gradients wait in a backlog for an exchange that they can hide (`defer`, `cover`).

`CutExchange` uses the group's collectives and hides nothing; `ntp.peer_exchange` uses the copy engines of the
GPUs of one host. The bits are the same: integers are added, and every kernel takes any rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ntp.collectives import Group


class Finish(Protocol):
    """Turns the sum of shares into numbers."""

    def __call__(self, total: Tensor, rows: slice, out: Tensor, /) -> object:
        """`total` i32 [rows, width], or [pieces, rows, width] still to be added."""
        ...


class Share(NamedTuple):
    """Storage i32 [rows, width] for a rank's share of some rows of a product."""

    rows: slice
    out: Tensor


class Backlog:
    """Work that nobody waits for, kept until an exchange can hide it; the newest is done first."""

    def __init__(self) -> None:
        self._work: list[tuple[float, Callable[[], None]]] = []

    def add(self, work: Callable[[], None], flops: float) -> None:
        """Keep work of so many floating-point operations."""
        self._work.append((flops, work))

    def run(self, flops: float = math.inf) -> None:
        """Do work of at least `flops` operations, or all there is."""
        while self._work and flops > 0:
            done, work = self._work.pop()
            work()
            flops -= done

    def clear(self) -> None:
        """Forget it."""
        self._work.clear()


class CutExchange:
    """The exchange by collectives, complete when `start` returns.

    Attributes:
        places: changes when storage has moved, whose addresses a captured graph would hold.
    """

    def __init__(self, group: "Group"):
        self._group = group
        self.places = 0

    def parts(self, tokens: int) -> Sequence[slice]:
        """The rows of each part, ascending."""
        return (slice(0, tokens),)

    def output(self, like: Tensor) -> Tensor:
        """Storage for a product of the shape, dtype and device of `like` [tokens, width].

        It is valid until the second product after this one.
        """
        return torch.empty_like(like)

    def shares(self, output: Tensor, rows: slice) -> Sequence[Share]:
        """Where to write this rank's shares of these rows of `output`, in this order."""
        return [Share(rows, torch.empty_like(output[rows], dtype=torch.int32))]

    def gather(self, local: Tensor, total_units: int, first_unit: int, rows: slice | None = None) -> Tensor:
        """What all units of the replica have, f32 [total units, n], from this rank's [units, n].

        Read it at once.

        Args:
            rows: of these rows of a product whose exchange comes next; None for anything else.
        """
        del rows
        return self._group.gather_units(local, total_units, first_unit)

    def start(self, shares: Sequence[Share], output: Tensor, finish: Finish) -> None:
        """Begin to add the ranks' shares, and to finish them into `output`."""
        for rows, share in shares:
            self._group.all_reduce(share)
            finish(share, rows, output[rows])

    def wait(self, output: Tensor, rows: slice | None = None) -> None:
        """Let what follows read these rows of `output` (all by default); any other tensor is complete."""
        del output, rows

    def defer(self, work: Callable[[], None], flops: float) -> None:
        """Do work that nobody waits for, of so many floating-point operations, now or behind an exchange."""
        del flops
        work()

    def cover(self, elements: int) -> None:
        """Do as much deferred work as hides the exchange of a product of so many elements."""
        del elements

    def flush(self) -> None:
        """Do all deferred work."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph may hold this exchange; collectives would tie their communicators to it."""
        return self._group.size == 1

    def release(self) -> None:
        """Let everything under way end, from another thread: a peer has gone and the results are garbage."""

    def close(self) -> None:
        """Give the storage up."""
