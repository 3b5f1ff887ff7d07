"""Where the state of a new plan comes from: the optimizer slices that the live ranks of an old plan keep.

Pure. After a change of membership every rank of the new plan needs its slices; each rectangle of them is
fetched from one live rank that keeps it under the old plan (from the rank itself where it can). All ranks
compute the same transfers, so nothing is negotiated. What no live rank keeps is listed as missing: the job
then goes back to a snapshot or a checkpoint.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ntp.parameters import ParameterSpec, kept_places, slice_of
from ntp.plan import Plan, Replica
from ntp.reshard import Rectangle, carriers, holders, kept_slices
from ntp.units import OwnerTable, UnitRange


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The transfers of one rank.

    Attributes:
        sends: rectangles that it gives away, ordered by peer; itself included.
        receives: rectangles that fill its slices, ordered by peer.
        missing: names of parameters of which some state survives nowhere; the same on every rank.
        travelling: elements that go from one rank to another, of all ranks; the same on every rank.
    """

    sends: tuple[Rectangle, ...]
    receives: tuple[Rectangle, ...]
    missing: tuple[str, ...]
    travelling: int


def keepers(plan: Plan, spec: ParameterSpec, replica: Replica) -> OwnerTable:
    """The ranks of `replica` that keep optimizer state of `spec`, and the units.

    With equal degrees every position keeps the state of a replicated parameter, else one of them does.
    """
    return holders(spec, replica) if plan.is_uniform else carriers(spec, replica)


def state_moves(
    old: Plan, new: Plan, alive: Collection[int], rank: int, specs: Iterable[ParameterSpec]
) -> StateMoves:
    """The transfers that take the state from `old` to `new`.

    Args:
        alive: ranks that still have their state under `old`.
        rank: whose transfers to return; it may be in either plan, or in none.
    """
    sends: list[Rectangle] = []
    receives: list[Rectangle] = []
    missing: list[str] = []
    travelling = 0
    for spec in specs:
        sources = _sources(old, spec, frozenset(alive))
        for place, replica in enumerate(new.replicas):
            for target, units in keepers(new, spec, replica).items():
                for start, stop in kept_slices(new, spec, place):
                    for part in _cut(sources, spec, target, units, start, stop):
                        if part.peer < 0:
                            missing.append(spec.name)
                            continue
                        if part.peer != target:
                            travelling += part.elements
                        if target == rank:
                            receives.append(part)
                        if part.peer == rank:
                            sends.append(Rectangle(spec, target, part.units, part.start, part.stop))
    return StateMoves(_ordered(sends), _ordered(receives), tuple(dict.fromkeys(missing)), travelling)


@dataclass(frozen=True, slots=True)
class _Source:
    """Elements `[start, stop)` under the old plan, and the live ranks that keep them."""

    start: int
    stop: int
    keepers: Sequence[tuple[int, UnitRange]]


def _sources(old: Plan, spec: ParameterSpec, alive: frozenset[int]) -> list[_Source]:
    count = len(old.replicas)
    tables = [keepers(old, spec, replica) for replica in old.replicas]
    found: list[_Source] = []
    for owner in range(count):
        start, stop = slice_of(spec, owner, count)
        places = [place for place in range(count) if owner in kept_places(place, count, old.copies)]
        live = [
            (rank, units)
            for place in places
            for rank, units in tables[place].items()
            if rank in alive and units
        ]
        found.append(_Source(start, stop, live))
    return found


def _cut(
    sources: Sequence[_Source], spec: ParameterSpec, target: int, wanted: UnitRange, start: int, stop: int
) -> Iterator[Rectangle]:
    """Rectangles of one slice of `target`, each with the rank to fetch it from (-1: nobody)."""
    for source in sources:
        first, last = max(start, source.start), min(stop, source.stop)
        if first >= last:
            continue
        edges = {edge for _, units in source.keepers for edge in (units.start, units.stop)}
        inside = sorted(edge for edge in edges if wanted.start < edge < wanted.stop)
        for low, high in zip([wanted.start, *inside], [*inside, wanted.stop], strict=True):
            if low == high:
                continue
            owners = [rank for rank, units in source.keepers if units.start <= low and high <= units.stop]
            peer = target if target in owners else owners[(low + spec.index) % len(owners)] if owners else -1
            yield Rectangle(spec, peer, UnitRange(low, high), first, last)


def _ordered(parts: Iterable[Rectangle]) -> tuple[Rectangle, ...]:
    return tuple(sorted(parts, key=lambda part: (part.peer, part.spec.index, part.start, part.units)))
