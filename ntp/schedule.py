"""Who computes which microbatches, and in which order their gradients are added.

The order of addition is part of the numerics and does not depend on the mesh: `grad_group` consecutive
microbatches are folded left to right into one group, and the groups of a step are summed in the fixed binary
tree whose node `(level, index)` covers groups `[index << level, (index + 1) << level)`, cut off at the number
of groups. A replica computes a contiguous range of groups, sums what the tree lets it sum, and hands over the
nodes that cover its range; the optimizer owner completes the tree.
"""

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A node of the summation tree; level 0 is a single group."""

    level: int
    index: int

    @property
    def sibling(self) -> "Node":
        """The other child of the parent."""
        return Node(self.level, self.index ^ 1)

    @property
    def parent(self) -> "Node":
        """The node one level up, of which this is a half."""
        return Node(self.level + 1, self.index >> 1)

    @property
    def first_group(self) -> int:
        """The leftmost of the groups that it covers."""
        return self.index << self.level


def root_of(groups: int) -> Node:
    """The node that covers all groups."""
    return Node((groups - 1).bit_length(), 0)


def assign_groups(groups: int, speeds: Sequence[int]) -> tuple[range, ...]:
    """Give each replica a contiguous range of groups so that the slowest finishes as early as possible.

    Args:
        groups: number of groups in a step.
        speeds: relative speed of each replica (its degree), at least 1 each.
    """
    common = math.lcm(*speeds)
    return assign_by_time(groups, [common // speed for speed in speeds])


def assign_by_time(groups: int, times: Sequence[int]) -> tuple[range, ...]:
    """As `assign_groups`, from what a group takes each replica: at least 1 each, in any unit."""
    counts = [0] * len(times)
    finish = [(time, place) for place, time in enumerate(times)]
    heapq.heapify(finish)
    for _ in range(groups):
        end, place = heapq.heappop(finish)
        counts[place] += 1
        heapq.heappush(finish, (end + times[place], place))
    stops = itertools.accumulate(counts)
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Fold:
    """How one replica sums its groups with a stack.

    Attributes:
        merges: for each group of the range, how often the two topmost sums are added after it is pushed.
        nodes: the tree nodes on the stack at the end, bottom first; they cover the range.
    """

    merges: tuple[int, ...]
    nodes: tuple[Node, ...]

    @property
    def depth(self) -> int:
        """The most sums that stand on the stack at once."""
        deepest = height = 0
        for merges in self.merges:
            height += 1
            deepest = max(deepest, height)
            height -= merges
        return deepest


def fold_of(mine: range, groups: int) -> Fold:
    """The stack program that sums `mine`, a contiguous part of `range(groups)`, as far as the tree allows."""
    root = root_of(groups)
    stack: list[Node] = []
    merges: list[int] = []
    for group in mine:
        stack.append(Node(0, group))
        merged = 0
        while stack[-1] != root:
            top = stack[-1]
            if top.sibling.first_group >= groups:  # nothing to its right: the parent is the same sum
                stack[-1] = top.parent
            elif len(stack) > 1 and stack[-2] == top.sibling:
                stack[-2:] = [top.parent]
                merged += 1
            else:
                break
        merges.append(merged)
    return Fold(tuple(merges), tuple(stack))


class Summand(Protocol):
    """What `complete` adds: a tensor, an array or a number."""

    def __add__(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=Summand)


def complete(sums: Mapping[Node, T], groups: int, last: Callable[[T, T], T] = operator.add) -> T:
    """Finish the tree: the sum over all groups from nodes that together cover them once.

    `last` makes the last addition, if there is one.
    """
    return _value(sums, groups, root_of(groups), last)


def _value(sums: Mapping[Node, T], groups: int, node: Node, add: Callable[[T, T], T]) -> T:
    """The sum of the groups under `node`, of which `add` makes the last addition."""
    if node in sums:
        return sums[node]
    left, right = Node(node.level - 1, node.index * 2), Node(node.level - 1, node.index * 2 + 1)
    if right.first_group >= groups:
        return _value(sums, groups, left, add)
    parts = (_value(sums, groups, part, operator.add) for part in (left, right))
    return add(*parts)
