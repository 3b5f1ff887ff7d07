"""A delivery on CPU that behaves like the one between GPUs: pieces arrive where all meet, in one inbox."""

import torch
from torch import Tensor

from ntp.delivery import PushingDelivery


class LateDelivery(PushingDelivery):
    """Between simulated ranks; an inbox holds NaN until all have met."""

    def __init__(self, group, incoming, dtype):
        super().__init__(group, incoming, dtype)
        inbox = torch.full((self._totals[group.rank],), torch.nan, dtype=dtype)
        self._inboxes: list[Tensor] = group._world.collect(group._post(inbox), group.size)
        self._sent: list[tuple[Tensor, Tensor]] = []

    def close(self) -> None:
        self._inboxes = []

    def _begin(self) -> None:
        pass

    def _push(self, place: int, start: int, piece: Tensor) -> None:
        target = self._inboxes[place][start : start + piece.numel()]
        assert target.numel() == piece.numel(), "a piece leaves the inbox"
        self._sent.append((target, piece))

    def _meet(self) -> Tensor:
        for target, piece in self._sent:
            target.copy_(piece.reshape(-1))
        self._sent = []
        self._group._world.collect(self._group._post(None), self._group.size)
        return self._inboxes[self._group.rank]
