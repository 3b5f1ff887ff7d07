"""Delivery between the GPUs of one host by copy engines, which take no multiprocessor.

A collective's kernels would: products that run on all multiprocessors then wait for the last of them, and
the backward behind which the exchange hides takes longer by about as much as the exchange does.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ntp.delivery import Incoming, PushingDelivery
from ntp.peer_memory import DeviceStream, PeerMemory, free_retired

if TYPE_CHECKING:
    from ntp.collectives import Group

_SENT = 0


class PeerDelivery(PushingDelivery):
    """Through the memory of the peers; all ranks of the group are GPUs of one host.

    Args:
        check: called before every step of it; raises where the generation is over.
    """

    def __init__(self, group: "Group", incoming: Incoming, dtype: torch.dtype, check: Callable[[], None]):
        super().__init__(group, incoming, dtype)
        self._check = check
        free_retired()  # all have closed what this delivery replaces
        count, here = self._totals[group.rank], group.rank
        self.memory = memory = PeerMemory(group, [dtype.itemsize * count], 1, group.device)
        self._addresses = [memory.address(place, 0) for place in range(group.size)]
        self._inbox = memory.view(0, (count,), dtype, here)
        self._lanes = {place: DeviceStream(torch.cuda.Stream()) for place in memory.others}

    def release(self) -> None:
        """Let everything under way end, from another thread: a peer has gone and the results are garbage."""
        self.memory.release()

    def close(self) -> None:
        """See `Delivery`."""
        self.drop()
        self.memory.close()

    def _begin(self) -> None:
        self._check()
        for lane in self._lanes.values():
            lane.stream.wait_stream(torch.cuda.current_stream())

    def _push(self, place: int, start: int, piece: Tensor) -> None:
        self._lanes[place].copy_rows(self._addresses[place] + self._dtype.itemsize * start, piece)

    def _meet(self) -> Tensor:
        self._check()
        for other, (place, lane) in enumerate(self._lanes.items()):
            assert self.memory.others[other] == place
            with torch.cuda.stream(lane.stream):
                self.memory.signal(_SENT, other)
            torch.cuda.current_stream().wait_stream(lane.stream)
        self.memory.await_signals(_SENT)
        return self._inbox
