"""Units, moves: every unit is owned once, and a move back undoes a move."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ntp.units import UnitRange, count_units, covers_once, moves, spread


@given(st.integers(0, 2000), st.integers(1, 70), st.booleans())
def test_spread_gives_every_unit_once_in_sizes_that_differ_by_at_most_one(count, parts, extras_first):
    ranges = spread(count, parts, extras_first)
    sizes = [len(r) for r in ranges]
    assert covers_once(ranges, count)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=extras_first)


def test_published_examples_of_uneven_heads():
    heads = [len(r) for r in spread(128, 30)]
    assert (heads.count(5), heads.count(4)) == (8, 22)
    groups = [len(r) for r in spread(8, 7)]
    assert (groups.count(2), groups.count(1)) == (1, 6)


def test_every_row_of_an_awkward_vocabulary_is_owned_once():
    for vocabulary in (50257, 151936):
        for degree in range(1, 9):
            units = count_units(vocabulary, 128)
            rows = [range(r.start * 128, min(r.stop * 128, vocabulary)) for r in spread(units, degree, False)]
            assert sum(len(r) for r in rows) == vocabulary
            assert all(a.stop == b.start for a, b in itertools.pairwise(rows))


@given(st.integers(0, 300), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_moves_fill_the_target_and_moving_back_is_the_identity(count, a, b, first):
    before = dict(enumerate(spread(count, a)))
    after = {100 + rank: units for rank, units in enumerate(spread(count, b, first))}
    held = {rank: {unit: unit * 7 for unit in units} for rank, units in before.items()}

    def carry(source, target, values):
        result = {rank: {} for rank in target}
        for move in moves(source, target):
            for unit in move.units:
                assert unit not in result[move.target], "delivered twice"
                result[move.target][unit] = values[move.source][unit]
        return result

    there = carry(before, after, held)
    assert {r: set(v) for r, v in there.items()} == {r: set(u) for r, u in after.items()}
    assert carry(after, before, there) == held


def test_intersection_of_disjoint_ranges_is_empty():
    assert len(UnitRange(0, 3).intersect(UnitRange(5, 9))) == 0
    assert not covers_once([UnitRange(0, 2), UnitRange(3, 4)], 4)
    assert not covers_once([UnitRange(0, 2), UnitRange(1, 4)], 4)
