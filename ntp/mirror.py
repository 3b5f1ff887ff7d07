"""Groups whose other ranks mirror this one: collectives end at once, with values that mean nothing.

What a rank launches is what it launches among real peers: the same kernels on tensors of the same shapes,
also where an exchange goes through the memory of peers. For rehearsals (`ntp.rehearsal`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ntp.collectives import Done, Group, Handle, ReduceOp
from ntp.exchange import CutExchange


class MirrorGroup(Group):
    """A group of one process that stands for all ranks.

    Args:
        device: where the tensors of its collectives are.
        through_peers: exchange cut products through the memory of "peers", which is this rank's own.
    """

    def __init__(self, ranks: Sequence[int], rank: int, device: torch.device, through_peers: bool = False):
        super().__init__(ranks, rank)
        self._device, self._through_peers = device, through_peers and device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """See `Group`."""
        return self._device

    def close(self) -> None:
        """Give the exchange's storage up."""
        if self._exchange is not None:
            self._exchange.close()

    def _make_exchange(self) -> CutExchange:
        if not self._through_peers or self.size == 1:
            return CutExchange(self)
        from ntp.peer_exchange import PeerExchange  # needs CUDA

        return PeerExchange(self, self.confirm)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        del tensor, op

    def _all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        everyone = tensor.new_zeros(sum(sizes), *tensor.shape[1:])
        for piece in everyone.split(list(sizes)):
            both = min(len(piece), len(tensor))
            piece[:both] = tensor[:both]
        return everyone

    def _all_to_all(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Handle:
        del source, output_splits, source_splits
        output.zero_()
        return Done()


class MirrorFabric:
    """Makes `MirrorGroup`s for one rank."""

    def __init__(self, rank: int, device: torch.device, through_peers: bool = False):
        self._rank, self._device, self._through_peers = rank, device, through_peers
        self._groups: list[MirrorGroup] = []

    def group(self, ranks: Sequence[int], on_host: bool = False) -> Group | None:
        """See `ntp.collectives.Fabric`."""
        if self._rank not in ranks:
            return None
        device = torch.device("cpu") if on_host else self._device
        group = MirrorGroup(ranks, list(ranks).index(self._rank), device, self._through_peers and not on_host)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Close every group."""
        for group in self._groups:
            group.close()
