"""An exchange on CPU that behaves like the one between GPUs: in parts, late, with a backlog.

An output holds NaN until somebody waits for it, and its storage is used again by the second product after it,
so that a caller that forgets to wait, or keeps an output too long, computes garbage.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.exchange import Backlog, CutExchange, Finish, Share

_SLOTS = 2


class LateExchange(CutExchange):
    """As many `PARTS` of the tokens, and of a part; a product on CPU may see how many rows it has."""

    PARTS = 3

    def __init__(self, group: Group):
        super().__init__(group)
        self.covered = 0
        self._backlog = Backlog()
        self._outputs: list[Tensor] = []
        self._arriving: list[tuple[Tensor, slice, Callable[[], None]]] = []

    def parts(self, tokens: int) -> Sequence[slice]:
        return self._cut(slice(0, tokens))

    def output(self, like: Tensor) -> Tensor:
        for old in self._outputs[: 1 - _SLOTS]:
            old.detach().fill_(torch.nan)
        self._outputs = [*self._outputs[1 - _SLOTS :], torch.full_like(like, torch.nan)]
        return self._outputs[-1]

    def shares(self, output: Tensor, rows: slice) -> Sequence[Share]:
        return [Share(some, torch.empty_like(output[some], dtype=torch.int32)) for some in self._cut(rows)]

    def start(self, shares: Sequence[Share], output: Tensor, finish: Finish) -> None:
        for rows, share in shares:
            self._group.all_reduce(share)

            def arrive(rows: slice = rows, share: Tensor = share) -> None:
                finish(share, rows, output.detach()[rows])

            self._arriving.append((output, rows, arrive))

    def wait(self, output: Tensor, rows: slice | None = None) -> None:
        waiting, self._arriving = self._arriving, []
        for sent, of_part, arrive in waiting:
            if sent.data_ptr() == output.data_ptr() and (rows is None or of_part.start < rows.stop):
                arrive()
            else:
                self._arriving.append((sent, of_part, arrive))

    def defer(self, work: Callable[[], None], flops: float) -> None:
        self._backlog.add(work, flops)

    def cover(self, elements: int) -> None:
        self.covered += 1
        self._backlog.run(4.0 * elements)  # of little, so that some stays for the next exchange

    def flush(self) -> None:
        self._backlog.run()

    def _cut(self, rows: slice) -> list[slice]:
        count = rows.stop - rows.start
        edges = [rows.start + count * index // self.PARTS for index in range(self.PARTS + 1)]
        return [slice(first, last) for first, last in pairwise(edges)]


class LateWholeExchange(LateExchange):
    """Late, but not in parts."""

    PARTS = 1
