"""Run a function over a simulated mesh: every rank is a thread of this process, no launcher, no sockets.

    def body(member: Member) -> int: ...
    results = simulate(body, make_plan(config, failed={3}))    # rank -> what body returned

Failed ranks are simply not started; a standby that the plan lets take over a coordinate runs as a worker, one
that stays idle is not started. The collectives have the semantics of `ntp.collectives`, so code under test
computes the bits that real processes compute. An exception in one rank ends all of them and is raised by
`simulate`. Torch should use one thread per rank (`torch.set_num_threads(1)`).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ntp.collectives import Group, Handle, Mesh, ReduceOp, build_mesh
from ntp.plan import Plan

T = TypeVar("T")


class MeshBrokenError(RuntimeError):
    """Another simulated rank failed or did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Member:
    """What a simulated worker knows."""

    rank: int
    plan: Plan
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class Process:
    """What any simulated process knows; `world` are all live ones, `mesh` is None on a standby."""

    rank: int
    plan: Plan
    world: Group
    mesh: Mesh | None


def simulate(function: Callable[[Member], T], plan: Plan, timeout_s: float = 120.0) -> dict[int, T]:
    """Run `function` on every worker of `plan` at once and return its results by rank.

    Raises:
        Exception: the first exception that a rank raised.
    """

    def on_worker(process: Process) -> T:
        assert process.mesh is not None
        return function(Member(process.rank, process.plan, process.mesh))

    return _run_threads(on_worker, plan, plan.workers, timeout_s)


def simulate_processes(
    function: Callable[[Process], T], plan: Plan, timeout_s: float = 120.0
) -> dict[int, T]:
    """Like `simulate`, on every live process of `plan`, standbys included."""
    return _run_threads(function, plan, plan.world, timeout_s)


def _run_threads(
    function: Callable[[Process], T], plan: Plan, ranks: Sequence[int], timeout_s: float
) -> dict[int, T]:
    meeting = SimulatedWorld(timeout_s)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            fabric = SimulatedFabric(meeting, rank)
            world = fabric.group(plan.world, on_host=True)
            assert world is not None
            results[rank] = function(Process(rank, plan, world, build_mesh(plan, rank, fabric)))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            meeting.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.error is not None:
        raise meeting.error
    return dict(sorted(results.items()))


class SimulatedWorld:
    """Where simulated ranks meet: values posted under a key until every rank of a group has read them."""

    def __init__(self, timeout_s: float):
        self.error: BaseException | None = None
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._posted: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._unread: dict[tuple[Any, ...], int] = {}

    def fail(self, error: BaseException) -> None:
        """Remember the first failure and wake everyone who waits."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def post(self, key: tuple[Any, ...], place: int, value: object) -> None:
        """Leave a value for the other members."""
        with self._changed:
            self._posted.setdefault(key, {})[place] = value
            self._changed.notify_all()

    def collect(self, key: tuple[Any, ...], size: int) -> list[Any]:
        """All values under `key`, once every member has posted. Raises MeshBrokenError where one fails."""
        with self._changed:
            complete = self._changed.wait_for(
                lambda: self.error is not None or len(self._posted.get(key, ())) == size, self._timeout_s
            )
            if self.error is not None:
                raise MeshBrokenError("another rank failed") from self.error
            if not complete:
                raise MeshBrokenError(
                    f"collective {key}: {len(self._posted.get(key, ()))} of {size} ranks came"
                )
            values = [self._posted[key][place] for place in range(size)]
            self._unread[key] = self._unread.get(key, size) - 1
            if self._unread[key] == 0:
                del self._unread[key], self._posted[key]
            return values


class SimulatedFabric:
    """Makes `SimulatedGroup`s for one rank."""

    def __init__(self, world: SimulatedWorld, rank: int):
        self._world = world
        self._rank = rank
        self._made = 0

    def group(self, ranks: Sequence[int], on_host: bool = False) -> Group | None:
        """See `ntp.collectives.Fabric`; `on_host` makes no difference here."""
        self._made += 1
        if self._rank not in ranks:
            return None
        return SimulatedGroup(ranks, list(ranks).index(self._rank), self._world, self._made)


class SimulatedGroup(Group):
    """A group of threads."""

    def __init__(self, ranks: Sequence[int], rank: int, world: SimulatedWorld, serial: int):
        super().__init__(ranks, rank)
        self._world = world
        self._key = (serial, self.ranks)
        self._calls = 0

    def _post(self, value: object) -> tuple[Any, ...]:
        self._calls += 1
        key = (*self._key, self._calls)
        self._world.post(key, self.rank, value)
        return key

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        values = torch.stack(self._world.collect(self._post(tensor.clone()), self.size))
        torch.sum(values, 0, dtype=tensor.dtype, out=tensor) if op == "sum" else torch.amax(
            values, 0, out=tensor
        )

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat(self._world.collect(self._post(tensor.clone()), self.size))

    def _all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Handle:
        assert sum(source_splits) == source.numel(), (source_splits, source.shape)
        assert sum(output_splits) == output.numel(), (output_splits, output.shape)
        key = self._post(source.clone().split(list(source_splits)))
        return _Delivery(self, key, output, output_splits)

    def _deliver(self, key: tuple[Any, ...], output: Tensor, splits: Sequence[int]) -> None:
        for target, pieces in zip(
            output.split(list(splits)), self._world.collect(key, self.size), strict=True
        ):
            target.copy_(pieces[self.rank])


@dataclass(frozen=True, slots=True)
class _Delivery:
    group: SimulatedGroup
    key: tuple[Any, ...]
    output: Tensor
    splits: Sequence[int]

    def wait(self) -> None:
        self.group._deliver(self.key, self.output, self.splits)
