"""How gradients travel between replicas, a bucket at a time, and how updated parameters come back.

A delivery is made for the buckets of a plan: it knows what arrives in each. `CollectiveDelivery` packs a
bucket into one all-to-all. A `PushingDelivery` copies every piece from where it lies into its place in the
receiver's inbox; `ntp.peer_delivery` does that with the copy engines of the GPUs of one host. The bits are
the same, they are copies.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.reshard import Parcel, post

Incoming = Sequence[Sequence[tuple[int, int]]]
"""Of every bucket: (process rank, number of elements) of each piece, of each rank in its order of sending."""


class Delivery(Protocol):
    """Collective: all ranks of the group start all buckets in one order, then finish."""

    def start(self, bucket: int, outgoing: Sequence[tuple[int, Tensor]]) -> None:
        """Send (process rank, [rows, columns]) pieces, which stay untouched until `finish`.

        For each rank in the order in which it expects them. Work of the device begins in the current stream.
        What a rank sends to itself may have any dtype.
        """
        ...

    def finish(self) -> list[list[Tensor]]:
        """What every bucket brought, in the order of `Incoming`: 1-D, or a rank's own pieces as they were.

        It may be read in the current stream until the ranks of the group have met once more.
        """
        ...

    def drop(self) -> None:
        """Forget what is under way."""
        ...

    def close(self) -> None:
        """Give the storage up; collective, but for a loss."""
        ...


def delivery_over(group: Group, incoming: Incoming, dtype: torch.dtype) -> Delivery:
    """The best delivery that the group has, of numbers of this dtype; collective."""
    return group.peer_delivery(incoming, dtype) or CollectiveDelivery(group, incoming, dtype)


class CollectiveDelivery:
    """By one all-to-all a bucket."""

    def __init__(self, group: Group, incoming: Incoming, dtype: torch.dtype):
        self._group, self._incoming = group, incoming
        self._like = torch.empty(0, dtype=dtype, device=group.device)
        self._parcels: list[Parcel] = []

    def start(self, bucket: int, outgoing: Sequence[tuple[int, Tensor]]) -> None:
        """See `Delivery`."""
        self._parcels.append(post(self._group, outgoing, self._incoming[bucket], self._like))

    def finish(self) -> list[list[Tensor]]:
        """See `Delivery`."""
        parcels, self._parcels = self._parcels, []
        return [parcel.wait() for parcel in parcels]

    def drop(self) -> None:
        """See `Delivery`."""
        self._parcels = []

    def close(self) -> None:
        """See `Delivery`."""
        self.drop()


class PushingDelivery(ABC):
    """By copies into the inbox of each receiver, where a bucket's pieces lie in the order of `Incoming`.

    Where a sender's first piece of a bucket goes is the receiver's to say: all tell all, once. An inbox is
    written again in the next step, which no rank begins before all have met for the norm of the gradient.
    So there is one exchange of gradients, and one of parameters, between two votes.
    """

    def __init__(self, group: Group, incoming: Incoming, dtype: torch.dtype):
        self._group, self._incoming, self._dtype = group, incoming, dtype
        self._places = {rank: place for place, rank in enumerate(group.ranks)}
        self._own: list[list[Tensor]] = [[] for _ in incoming]
        starts, total = self._layout()
        table = torch.tensor([*starts, total], dtype=torch.int64, device=group.device)
        everyone = group.all_gather(table.unsqueeze(0), [1] * group.size).tolist()
        group.confirm()
        self._totals: list[int] = [row[-1] for row in everyone]
        self._starts: list[list[int]] = [row[:-1] for row in everyone]

    def start(self, bucket: int, outgoing: Sequence[tuple[int, Tensor]]) -> None:
        """See `Delivery`."""
        self._begin()
        here, size = self._group.rank, self._group.size
        cursors = [starts[bucket * size + here] for starts in self._starts]
        for rank, piece in outgoing:
            place = self._places[rank]
            if place == here:
                self._own[bucket].append(piece)
            else:
                assert piece.dtype == self._dtype, (piece.dtype, self._dtype)
                self._push(place, cursors[place], piece)
                cursors[place] += piece.numel()

    def finish(self) -> list[list[Tensor]]:
        """See `Delivery`."""
        inbox, first = self._meet(), 0
        found: list[list[Tensor]] = []
        for incoming, own in zip(self._incoming, self._own, strict=True):
            mine, pieces = iter(own), list[Tensor]()
            for rank, elements in incoming:
                if self._places[rank] == self._group.rank:
                    pieces.append(next(mine))
                else:
                    pieces.append(inbox[first : first + elements])
                    first += elements
            found.append(pieces)
        self.drop()
        return found

    def drop(self) -> None:
        """See `Delivery`."""
        self._own = [[] for _ in self._incoming]

    @abstractmethod
    def close(self) -> None:
        """See `Delivery`."""

    def _layout(self) -> tuple[list[int], int]:
        """Where the pieces of (bucket, sender) begin in this rank's inbox, and its elements in all."""
        starts = [0] * (len(self._incoming) * self._group.size)
        seen: set[int] = set()
        total = 0
        for bucket, pieces in enumerate(self._incoming):
            for rank, elements in pieces:
                entry = bucket * self._group.size + self._places[rank]
                if self._places[rank] == self._group.rank:
                    continue
                if entry not in seen:
                    seen.add(entry)
                    starts[entry] = total
                total += elements
        return starts, total

    @abstractmethod
    def _begin(self) -> None:
        """A bucket begins: what it sends is there once the current stream is here."""

    @abstractmethod
    def _push(self, place: int, start: int, piece: Tensor) -> None:
        """Copy a piece [rows, columns] to element `start` of the inbox of the rank at `place`."""

    @abstractmethod
    def _meet(self) -> Tensor:
        """Tell all that what they get has been sent, wait for all, and return this rank's inbox, 1-D."""
