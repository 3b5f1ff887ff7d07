"""Who sends which rectangle of a parameter to whom, and the one collective that carries it.

A *rectangle* is a range of units times an element range inside every unit. Two kinds of transfer exist in a
step, mirror images of each other:

* gradients: from the ranks that computed them to the *carrier* of the optimizer slice, one per replica slice;
* parameters: from the carriers to every rank that holds the units.

Both come from `moves` between owner tables, whatever the degrees of the replicas are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ntp.collectives import Group, Handle
from ntp.parameters import ParameterSpec, kept_places, slice_of
from ntp.plan import Plan, Replica
from ntp.units import OwnerTable, UnitRange, moves


@dataclass(frozen=True, slots=True)
class Rectangle:
    """`units` x elements `[start, stop)` of `spec`, to or from the process rank `peer`."""

    spec: ParameterSpec
    peer: int
    units: UnitRange
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many numbers."""
        return len(self.units) * (self.stop - self.start)

    def of(self, tensor: Tensor, held: UnitRange, first: int = 0) -> Tensor:
        """This rectangle in `tensor` `[len(held), elements]`, whose first column is element `first`."""
        flat = tensor.view(len(held), prod(tensor.shape[1:]))
        return flat[held.local(self.units), self.start - first : self.stop - first]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank sends and receives, each ordered by peer, parameter and unit."""

    sends: tuple[Rectangle, ...]
    receives: tuple[Rectangle, ...]


Tables = Callable[[ParameterSpec, Replica], OwnerTable]
"""For one parameter: which rank of a replica has which units."""


def holders(spec: ParameterSpec, replica: Replica) -> OwnerTable:
    """The units that every rank of a replica computes with."""
    if spec.kind is None:
        return dict.fromkeys(replica.members, UnitRange(0, 1))
    return replica.owner_table(spec.kind)


def carriers(spec: ParameterSpec, replica: Replica) -> OwnerTable:
    """The units of which each rank of a replica exchanges the gradient: every unit once.

    A replicated parameter has one carrier, chosen by turns so that no rank carries them all.
    """
    if spec.kind is None:
        return {replica.members[spec.index % replica.degree]: UnitRange(0, 1)}
    return replica.owner_table(spec.kind)


def gradient_manifest(plan: Plan, rank: int, specs: Iterable[ParameterSpec], carried_by: Tables) -> Manifest:
    """Gradient rectangles from every replica to all carriers that keep a slice of the optimizer state."""
    here_place = place_of(plan, rank)
    sends: list[Rectangle] = []
    receives: list[Rectangle] = []
    for spec in specs:
        here = _only(carried_by(spec, plan.replicas[here_place]), rank)
        for place, replica in enumerate(plan.replicas):
            there = carried_by(spec, replica)
            for start, stop in kept_slices(plan, spec, place):
                sends += [Rectangle(spec, m.target, m.units, start, stop) for m in moves(here, there)]
            for start, stop in kept_slices(plan, spec, here_place):
                receives += [Rectangle(spec, m.source, m.units, start, stop) for m in moves(there, here)]
    return _ordered(sends, receives)


def parameter_manifest(
    plan: Plan, rank: int, specs: Iterable[ParameterSpec], carried_by: Tables, held_by: Tables
) -> Manifest:
    """Parameter rectangles to every holder: from its own replica's carriers where they keep the slice."""
    here_place, holders_count = place_of(plan, rank), len(plan.replicas)
    kept = [kept_places(place, holders_count, plan.copies) for place in range(holders_count)]
    sends: list[Rectangle] = []
    receives: list[Rectangle] = []
    for spec in specs:
        mine = plan.replicas[here_place]
        carried, held = _only(carried_by(spec, mine), rank), _only(held_by(spec, mine), rank)
        for target, replica in enumerate(plan.replicas):
            for owner in range(holders_count):
                source = target if owner in kept[target] else owner
                start, stop = slice_of(spec, owner, holders_count)
                if source == here_place:
                    delivered = moves(carried, held_by(spec, replica))
                    sends += [Rectangle(spec, m.target, m.units, start, stop) for m in delivered]
                if target == here_place:
                    delivered = moves(carried_by(spec, plan.replicas[source]), held)
                    receives += [Rectangle(spec, m.source, m.units, start, stop) for m in delivered]
    return _ordered(sends, receives)


def place_of(plan: Plan, rank: int) -> int:
    """Which of the live replicas `rank` works in."""
    return plan.replicas.index(plan.replica_of(rank))


def kept_slices(plan: Plan, spec: ParameterSpec, place: int) -> list[tuple[int, int]]:
    """Element ranges of every unit of `spec` whose state the replica at `place` keeps, its own first."""
    holders_count = len(plan.replicas)
    return [slice_of(spec, owner, holders_count) for owner in kept_places(place, holders_count, plan.copies)]


def _only(table: OwnerTable, rank: int) -> OwnerTable:
    return {rank: table[rank]} if rank in table else {}


def _ordered(sends: Iterable[Rectangle], receives: Iterable[Rectangle]) -> Manifest:
    def order(rectangle: Rectangle) -> tuple[int, int, UnitRange, int]:
        return rectangle.peer, rectangle.spec.index, rectangle.units, rectangle.start

    return Manifest(
        tuple(sorted((r for r in sends if r.elements), key=order)),
        tuple(sorted((r for r in receives if r.elements), key=order)),
    )


@dataclass(slots=True)
class Parcel:
    """A transfer under way."""

    handle: Handle | None  # None where nothing travels
    pieces: list[Tensor]
    source: Tensor | None = None  # kept alive until the transfer is done

    def wait(self) -> list[Tensor]:
        """The received pieces, 1-D, in the order in which they were announced."""
        if self.handle is not None:
            self.handle.wait()
        return self.pieces


def post(
    group: Group, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]], like: Tensor
) -> Parcel:
    """Start one all-to-all that carries every piece; a rank alone gets views of what it sends.

    Args:
        group: the ranks that take part; all of them call.
        outgoing: (process rank, tensor) pairs; for each peer in the order in which it expects them.
        incoming: (process rank, number of elements) pairs; for each peer in the order in which it sends them.
        like: gives dtype and device.
    """
    if group.size == 1:
        assert [piece.numel() for _, piece in outgoing] == [elements for _, elements in incoming]
        return Parcel(None, [piece.reshape(-1) for _, piece in outgoing])
    place = {rank: index for index, rank in enumerate(group.ranks)}
    source_splits, output_splits = [0] * group.size, [0] * group.size
    for rank, piece in outgoing:
        source_splits[place[rank]] += piece.numel()
    for rank, elements in incoming:
        output_splits[place[rank]] += elements
    source, first = like.new_empty(sum(source_splits)), 0
    for _, piece in sorted(outgoing, key=lambda item: place[item[0]]):
        source[first : first + piece.numel()].view(piece.shape).copy_(piece)
        first += piece.numel()
    output = like.new_empty(sum(output_splits))
    handle = group.all_to_all(output, source, output_splits, source_splits)
    cursors = [sum(output_splits[:index]) for index in range(group.size)]
    pieces: list[Tensor] = []
    for rank, elements in incoming:
        start = cursors[place[rank]]
        cursors[place[rank]] += elements
        pieces.append(output[start : start + elements])
    return Parcel(handle, pieces, source)
