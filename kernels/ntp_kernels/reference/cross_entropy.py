"""Vocabulary-parallel cross entropy: three local passes over logits [M, U, V], combined by the caller.

Unit u of the call holds the vocabulary rows from `(first_unit + u) * V`; rows from `vocab_size` on are
padding and have probability zero. The caller takes the MAX of `ce_statistics` over ranks, then the integer
SUM of `ce_sums`. The sum of exponentials is taken per unit in float32 and added on the grid 2^-40, so that
any cut gives the same integer.

A row with a NaN, or whose largest logit is infinite, has `row_max` infinite (MAX over ranks would lose a
NaN); its sum is 0, its loss is the caller's NaN, and a NaN in `lse` makes the whole row of `ce_backward`
NaN.
"""

import torch

GRID_BITS = 40
"""Sums of exponentials are integers in units of 2^-40: room for 2^23 vocabulary rows in an int64."""

IGNORED = -100
"""Target of a token that has no loss."""


def ce_statistics(
    logits: torch.Tensor, first_unit: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f32 [M], the largest logit of the local rows (+inf if one is NaN), and f32 [M, U, 2] for
    `ce_sums`.

    The statistics of a unit are its largest logit and the sum of `exp(logit - largest)`.
    """
    blocks = _blocks(logits, first_unit, vocab_size)
    tops = blocks.amax(2)
    tops.masked_fill_(tops.isnan(), torch.inf)
    blocks.sub_(tops.unsqueeze(2))
    sums = torch.empty_like(tops)
    for unit, block in enumerate(blocks):
        sums[unit] = block.exp_().sum(1)
    sums.masked_fill_(~tops.isfinite(), 0)
    nothing = tops.new_full((1, tops.shape[1]), -torch.inf)
    return torch.cat([nothing, tops]).amax(0), torch.stack([tops, sums], 2).transpose(0, 1).contiguous()


def ce_sums(
    logits: torch.Tensor,
    row_max: torch.Tensor,
    targets: torch.Tensor,
    first_unit: int,
    vocab_size: int,
    statistics: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return i64 [M], the sum of `exp(logit - row_max)` on the grid, and i32 [M], the target logit's f32
    bits.

    `row_max` f32 [M] is the maximum over all ranks; `targets` i64 [M]. The bits are 0 where the target's
    row is not local (or the target is ignored), so that an integer SUM over ranks selects.
    """
    tops, parts = statistics.permute(2, 1, 0).contiguous().unbind(0)
    scales = tops - row_max
    for scale in scales:
        scale.exp_()
    sums = (scales * parts).double().mul_(2.0**GRID_BITS).round_().to(torch.int64).sum(0)
    sums.masked_fill_(~row_max.isfinite(), 0)
    if not logits.numel():
        return sums, row_max.new_zeros(row_max.shape, dtype=torch.int32)
    column, owned = _target_columns(logits, targets, first_unit, vocab_size)
    picked = logits.flatten(1).gather(1, column.unsqueeze(1)).squeeze(1).float()
    return sums, picked.view(torch.int32).masked_fill(~owned, 0)


def ce_backward(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    first_unit: int,
    vocab_size: int,
    out: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return dlogits [M, U, V] of the SUM of token losses: softmax minus one-hot, from lse f32 [M].

    Padded vocabulary columns and rows with an ignored target are exactly 0. `out` may be `logits` itself;
    `weights` f32 [M] are of the losses in their sum.
    """
    if not logits.numel():
        return torch.empty_like(logits) if out is None else out
    blocks = _blocks(logits, first_unit, vocab_size).sub_(lse.unsqueeze(1))
    for block in blocks:
        block.exp_()
    dlogits = blocks.transpose(0, 1).contiguous()
    column, owned = _target_columns(logits, targets, first_unit, vocab_size)
    dlogits.flatten(1).scatter_add_(1, column.unsqueeze(1), owned.float().neg_().unsqueeze(1))
    if weights is not None:
        dlogits.mul_(weights[:, None, None])
    dlogits.flatten(1)[:, max(vocab_size - first_unit * logits.shape[2], 0) :] = 0
    dlogits.masked_fill_((targets == IGNORED)[:, None, None], 0)
    return dlogits.to(logits.dtype) if out is None else out.copy_(dlogits)


def _blocks(logits: torch.Tensor, first_unit: int, vocab_size: int) -> torch.Tensor:
    """Return a fresh f32 [U, M, V] of the logits, -inf in the padded columns."""
    _, units, width = logits.shape
    blocks = logits.float().transpose(0, 1).clone(memory_format=torch.contiguous_format)
    for unit in range(max(vocab_size // width - first_unit, 0), units):
        blocks[unit, :, max(vocab_size - (first_unit + unit) * width, 0) :] = -torch.inf
    return blocks


def _target_columns(
    logits: torch.Tensor, targets: torch.Tensor, first_unit: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's local column i64 [M] (0 where not local) and whether it is local, bool [M]."""
    _, units, width = logits.shape
    column = targets - first_unit * width
    owned = (column >= 0) & (column < units * width) & (targets < vocab_size)
    return column.masked_fill(~owned, 0), owned
