"""Units, unit ranges and owner tables: the only shard arithmetic in the project.

A *unit* is the smallest indivisible piece of a sharded dimension and has a global id. An *owner table* says
which rank owns which half-open range of units. `moves(source, target)` turns two owner tables into transfers;
gradients, parameters, optimizer state, checkpoints and recovery all use it, so none of them divides by a
tensor-parallel degree.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class UnitKind(StrEnum):
    """What a unit is made of."""

    KV = "kv"  # a key/value head with its query heads
    FFN = "ffn"  # a block of feed-forward columns: gate rows, up rows, down columns
    VOCAB = "vocab"  # a block of vocabulary rows


@dataclass(frozen=True, slots=True, order=True)
class UnitRange:
    """Half-open range `[start, stop)` of unit ids."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def intersect(self, other: "UnitRange") -> "UnitRange":
        """The units in both ranges (possibly none)."""
        start = max(self.start, other.start)
        return UnitRange(start, max(start, min(self.stop, other.stop)))

    def local(self, inner: "UnitRange") -> slice:
        """Where `inner`, which lies inside this range, sits in a tensor that holds exactly this range."""
        assert self.start <= inner.start <= inner.stop <= self.stop, (self, inner)
        return slice(inner.start - self.start, inner.stop - self.start)


OwnerTable = Mapping[int, UnitRange]
"""Rank -> the units it owns. Two ranks may own the same units (a replicated parameter)."""


@dataclass(frozen=True, slots=True)
class Move:
    """Units that go from one rank to another; `source == target` is a local copy."""

    source: int
    target: int
    units: UnitRange


def spread(count: int, parts: int, extras_first: bool = True) -> tuple[UnitRange, ...]:
    """Cut `count` units into `parts` contiguous ranges whose sizes differ by at most one.

    Args:
        count: number of units, at least 0.
        parts: number of ranges, at least 1; more parts than units leaves ranges empty.
        extras_first: whether the first ranges (or the last) take the units that are left over.
    """
    base, extra = divmod(count, parts)
    ranges: list[UnitRange] = []
    start = 0
    for part in range(parts):
        heavy = part < extra if extras_first else part >= parts - extra
        stop = start + base + heavy
        ranges.append(UnitRange(start, stop))
        start = stop
    return tuple(ranges)


def moves(source: OwnerTable, target: OwnerTable) -> tuple[Move, ...]:
    """Every transfer that fills `target` from `source`, ordered by target rank, then by unit.

    Each unit must have one owner in `source`; it may be wanted by several ranks of `target`.
    """
    by_start = sorted(source.items(), key=lambda item: item[1])
    found: list[Move] = []
    for wanted_by, wanted in sorted(target.items()):
        for owner, owned in by_start:
            common = owned.intersect(wanted)
            if common:
                found.append(Move(owner, wanted_by, common))
    return tuple(found)


def count_units(size: int, width: int) -> int:
    """Number of units of `width` that hold `size` rows, the last one padded."""
    return -(-size // width)


def covers_once(ranges: Iterable[UnitRange], count: int) -> bool:
    """Whether the ranges hold every unit of `[0, count)` exactly once."""
    stop = 0
    for unit_range in sorted(ranges):
        if not unit_range:
            continue
        if unit_range.start != stop:
            return False
        stop = unit_range.stop
    return stop == count
