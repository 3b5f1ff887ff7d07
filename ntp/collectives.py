"""The few collectives that the trainer needs, behind one interface.

A float is never added across ranks: `all_reduce` sums integers only, so no result depends on an algorithm, a
ring order or a channel count. Implementations: `TorchGroup` over a torch.distributed process group here,
simulated ranks (threads) in `ntp.testing`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from ntp.exchange import CutExchange
from ntp.plan import Plan

if TYPE_CHECKING:
    from ntp.delivery import Delivery, Incoming
    from ntp.peer_delivery import PeerDelivery

ReduceOp = Literal["sum", "max"]

_HOST_TIMEOUT = timedelta(hours=2)
"""Of a collective of a host group: one rank may write a checkpoint to a slow disk while the others wait."""


class PeerLostError(RuntimeError):
    """A collective failed because another rank has gone; what it left in its tensors is garbage."""


class MembershipChangedError(RuntimeError):
    """The generation that this group belongs to is over: leave it for the next."""


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the output may be read."""
        ...


class Group(ABC):
    """Ranks that communicate; `ranks` are process ranks, `rank` is this process's place among them."""

    def __init__(self, ranks: Sequence[int], rank: int):
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self._exchange: CutExchange | None = None

    @property
    def exchange(self) -> CutExchange:
        """How these ranks add cut products; the first use is collective."""
        if self._exchange is None:
            self._exchange = self._make_exchange()
        return self._exchange

    @property
    def device(self) -> torch.device:
        """Where the tensors of its collectives are."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Wait for the device, and raise MembershipChangedError where what it did was cut short."""
        self.confirm()

    @property
    def leads(self) -> bool:
        """Whether this is the member with the lowest process rank, the one that reports."""
        return self.ranks[self.rank] == min(self.ranks)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Combine `tensor` (any shape, the same on every rank) in place; a sum takes integers only."""
        assert op == "max" or not tensor.is_floating_point(), "a floating-point sum depends on its order"
        if self.size > 1:
            self._all_reduce(tensor, op)

    def gather_units(self, local: Tensor, total: int, first: int) -> Tensor:
        """All units [total, ...] from every rank's own [U, ...], which begin with unit `first`; floats.

        An integer SUM of bit patterns, of which each is non-zero on one rank: exact, -0.0 and NaN included.
        """
        every = local.new_zeros(total, *local.shape[1:])
        every[first : first + local.shape[0]] = local
        self.all_reduce(every.view(torch.int32 if local.dtype == torch.float32 else torch.int64))
        return every

    def all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate over the group along dim 0; rank `i` brings `sizes[i]` rows."""
        assert tensor.shape[0] == sizes[self.rank], (tensor.shape, sizes)
        return tensor if self.size == 1 else self._all_gather(tensor, sizes)

    def all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Handle:
        """Start sending `source_splits[i]` elements to rank `i` and receiving `output_splits[i]` from it.

        Both tensors are 1-D and stay untouched by the caller until `wait` returns.
        """
        if self.size > 1:
            return self._all_to_all(output, source, output_splits, source_splits)
        output.copy_(source)
        return Done()

    def confirm(self) -> None:
        """Raise if what the host has just read of a result may be garbage, because the group was aborted."""
        return

    def peer_delivery(self, incoming: "Incoming", dtype: torch.dtype) -> "Delivery | None":
        """A delivery through peers' memory, None where there can be none; collective (`ntp.delivery`)."""
        del incoming, dtype
        return None

    def _make_exchange(self) -> CutExchange:
        return CutExchange(self)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor: ...

    @abstractmethod
    def _all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Handle: ...


class Done:
    """A collective that is complete."""

    def wait(self) -> None:
        """See `Handle`."""


class Fabric(Protocol):
    """Makes groups; every rank of the job calls `group` with the same lists in the same order."""

    def group(self, ranks: Sequence[int], on_host: bool = False) -> Group | None:
        """A group of these process ranks, or None where the caller is not among them.

        With `on_host` it carries tensors in host memory whatever the device, and has time for slow disks.
        """
        ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of one worker under one plan.

    Attributes:
        workers: every rank that holds a shard.
        tensor: the ranks of this worker's replica, by tensor-parallel position.
        peers: the ranks at this worker's position in every replica that has that position.
        host: the ranks of `workers` again, with host tensors: for checkpoints, behind the training steps.
    """

    rank: int
    workers: Group
    tensor: Group
    peers: Group
    host: Group


def build_mesh(plan: Plan, rank: int, fabric: Fabric) -> Mesh | None:
    """Create the groups of `plan`; None for a standby. Collective over every live rank."""

    def mine(lists: Sequence[Sequence[int]], on_host: bool = False) -> Group | None:
        groups = [fabric.group(ranks, on_host) for ranks in lists]
        return next((group for group in groups if group is not None), None)

    workers = mine([plan.workers])
    tensor = mine([replica.members for replica in plan.replicas])
    degree = max(replica.degree for replica in plan.replicas)
    columns = [[r.members[p] for r in plan.replicas if p < r.degree] for p in range(degree)]
    peers = mine(columns)
    host = mine([plan.workers], on_host=True)
    if workers is None or tensor is None or peers is None or host is None:
        return None
    return Mesh(rank, workers, tensor, peers, host)


Check = Callable[[], None]
"""Called before every collective; raises MembershipChangedError where the generation is over."""


class TorchGroup(Group):
    """A torch.distributed process group whose collectives carry tensors of `device`.

    Raises PeerLostError from any collective whose peers have gone.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup,
        check: Check = lambda: None,
        device: torch.device | None = None,
        through_peers: bool = False,
    ):
        super().__init__(ranks, rank)
        self._process_group: dist.ProcessGroup | None = process_group
        self._check = check
        self._device = device or torch.device("cpu")
        self._through_peers = through_peers and self._device.type == "cuda"
        self._deliveries: list[PeerDelivery] = []
        self._aborting = threading.Lock()
        self._aborted = False

    def confirm(self) -> None:
        """Raises MembershipChangedError where the generation is over."""
        self._check()

    @property
    def device(self) -> torch.device:
        """See `Group`."""
        return self._device

    def synchronize(self) -> None:
        """See `Group`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.confirm()

    def abort(self) -> None:
        """End what is under way on the device, from another thread; it would wait for a dead peer for ever.

        Nothing of a group on the host: closed connections end its waiting.
        """
        with self._aborting:
            if self._aborted or self._device.type != "cuda":
                return
            self._aborted = True
        if self._exchange is not None:
            self._exchange.release()
        for delivery in list(self._deliveries):
            delivery.release()
        process_group = self._process_group
        if process_group is not None:
            process_group.abort()

    def close(self) -> None:
        """Give the connections up, so that peers that wait for this rank fail at once."""
        if self._exchange is not None:
            self._exchange.close()
        for delivery in self._deliveries:
            delivery.release()
            delivery.close()
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            dist.destroy_process_group(process_group)

    @contextmanager
    def _guarded(self) -> Iterator[dist.ProcessGroup]:
        self._check()
        if self._process_group is None:
            raise MembershipChangedError("this group has been closed")
        try:
            yield self._process_group
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error

    def peer_delivery(self, incoming: "Incoming", dtype: torch.dtype) -> "Delivery | None":
        """See `Group`."""
        if not self._through_peers:
            return None
        from ntp.peer_delivery import PeerDelivery  # needs CUDA
        from ntp.peer_memory import all_reach_all, free_retired

        if not self._deliveries:
            free_retired()  # all have left earlier generations
        if self.size == 1 or not all_reach_all(self):
            return None
        self._deliveries.append(PeerDelivery(self, incoming, dtype, self._check))
        return self._deliveries[-1]

    def _make_exchange(self) -> CutExchange:
        if not self._through_peers:
            return CutExchange(self)
        from ntp.peer_exchange import PeerExchange  # needs CUDA
        from ntp.peer_memory import all_reach_all

        reach = self.size > 1 and all_reach_all(self)
        return PeerExchange(self, self._check) if reach else CutExchange(self)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        with self._guarded() as process_group:
            dist.all_reduce(tensor, kind, group=process_group)

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        pieces = [torch.empty_like(padded) for _ in sizes]
        with self._guarded() as process_group:
            dist.all_gather(pieces, padded, group=process_group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    def _all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Handle:
        with self._guarded() as process_group:
            work = dist.all_to_all_single(
                output, source, list(output_splits), list(source_splits), group=process_group, async_op=True
            )
        assert work is not None
        return _GuardedWork(self, work)


@dataclass(frozen=True, slots=True)
class _GuardedWork:
    group: TorchGroup
    work: Handle

    def wait(self) -> None:
        with self.group._guarded():
            self.work.wait()


class TorchFabric:
    """Groups of an initialised torch.distributed world whose rank `i` is process rank `world[i]`.

    Args:
        build_timeout: for building a group.
        timeout: of a collective, but for groups on the host.
        device: where this rank computes.
        through_peers: exchange cut products through the memory of the GPUs of one host (`parallel.exchange`).
    """

    def __init__(
        self,
        world: Sequence[int],
        rank: int,
        check: Check,
        build_timeout: timedelta,
        timeout: timedelta,
        device: torch.device,
        through_peers: bool = False,
    ):
        self._device, self._through_peers = device, through_peers
        self._build_timeout, self._timeout = build_timeout, timeout
        self._index = {process: place for place, process in enumerate(world)}
        self._rank = rank
        self._check = check
        self._groups: list[TorchGroup] = []

    def group(self, ranks: Sequence[int], on_host: bool = False) -> Group | None:
        """See `Fabric`. Raises PeerLostError where a peer does not come in time."""
        options: dict[str, Any] = {"backend": "gloo"} if on_host else {}
        self._check()
        try:
            process_group = dist.new_group(
                [self._index[rank] for rank in ranks], timeout=self._build_timeout, **options
            )
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        if self._rank not in ranks:
            return None
        assert isinstance(process_group, dist.ProcessGroup)
        _set_pg_timeout(_HOST_TIMEOUT if on_host else self._timeout, process_group)
        device = torch.device("cpu") if on_host else self._device
        place, through_peers = list(ranks).index(self._rank), self._through_peers
        group = TorchGroup(ranks, place, process_group, self._check, device, through_peers)
        self._groups.append(group)
        return group

    def abort(self) -> None:
        """Abort every group, all at once, from another thread."""
        groups = list(self._groups)
        with ThreadPoolExecutor(max(1, len(groups))) as pool:
            list(pool.map(TorchGroup.abort, groups))

    def close(self) -> None:
        """Close every group, in the order in which all ranks made them."""
        for group in self._groups:
            group.close()
