"""Vocabulary-sharded embedding lookup and its gradient.

Unit u of the call holds the token ids from `(first_unit + u) * V`. The lookup selects and never adds: a
token whose row lives elsewhere gives +0.0 bits, so that callers combine ranks by integer addition of bit
patterns.
"""

import torch


def embedding(ids: torch.Tensor, w: torch.Tensor, first_unit: int) -> torch.Tensor:
    """Return the rows [M, D] of w [U, V, D] for ids i64 [M]; +0.0 where the row is not in this shard."""
    if not w.shape[0]:
        return w.new_zeros(ids.shape[0], w.shape[2])
    row, owned = _local_rows(ids, w, first_unit)
    return w.flatten(0, 1)[row.masked_fill(~owned, 0)].masked_fill_(~owned.unsqueeze(1), 0)


def embedding_wgrad(ids: torch.Tensor, dy: torch.Tensor, first_unit: int, out: torch.Tensor) -> None:
    """Add dy [M, D] to the rows of out f32 [U, V, D] that ids i64 [M] name, one token after the other."""
    row, owned = _local_rows(ids, out, first_unit)
    out.flatten(0, 1).index_add_(0, row[owned], dy[owned].float())


def _local_rows(ids: torch.Tensor, w: torch.Tensor, first_unit: int) -> tuple[torch.Tensor, torch.Tensor]:
    units, width, _ = w.shape
    row = ids - first_unit * width
    return row, (row >= 0) & (row < units * width)
