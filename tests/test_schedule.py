"""The order of gradient addition: one tree, whoever computes which groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp.schedule import Node, assign_groups, complete, fold_of


class Expression(str):
    """A sum that remembers its parentheses."""

    def __add__(self, other):
        return Expression(f"({self}+{other})")


def run_fold(mine, groups):
    fold = fold_of(mine, groups)
    stack = []
    for group, merges in zip(mine, fold.merges, strict=True):
        stack.append(Expression(group))
        for _ in range(merges):
            top = stack.pop()
            stack[-1] = stack[-1] + top
    return dict(zip(fold.nodes, stack, strict=True))


@given(st.integers(1, 40), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_the_sum_has_the_same_parentheses_for_every_assignment(groups, speeds):
    alone = complete(run_fold(range(groups), groups), groups)
    shares = assign_groups(groups, speeds)
    nodes = {}
    for share in shares:
        nodes |= run_fold(share, groups)
    assert complete(nodes, groups) == alone


@given(st.integers(0, 200), st.lists(st.integers(1, 8), min_size=1, max_size=16))
def test_every_group_is_computed_once_and_nobody_could_finish_earlier(groups, speeds):
    shares = assign_groups(groups, speeds)
    assert [g for share in shares for g in share] == list(range(groups))
    finish = max(len(share) / speed for share, speed in zip(shares, speeds, strict=True))
    for share, speed in zip(shares, speeds, strict=True):
        if share:
            assert finish <= (len(share) + 1) / speed or finish == len(share) / speed


def test_groups_follow_the_degrees():
    assert [len(s) for s in assign_groups(28, [4, 3])] == [16, 12]


@pytest.mark.parametrize("groups", range(1, 20))
def test_a_single_replica_hands_over_one_node(groups):
    assert len(fold_of(range(groups), groups).nodes) == 1


@given(st.integers(1, 300), st.data())
def test_a_range_is_covered_by_few_nodes(groups, data):
    start = data.draw(st.integers(0, groups - 1))
    stop = data.draw(st.integers(start + 1, groups))
    assert len(fold_of(range(start, stop), groups).nodes) <= max(1, 2 * (groups - 1).bit_length())


def test_left_and_right_are_added_in_group_order():
    nodes = {Node(1, 0): Expression("a"), Node(1, 1): Expression("b"), Node(2, 1): Expression("c")}
    assert complete(nodes, 6) == "((a+b)+c)"
