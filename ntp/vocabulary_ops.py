"""Differentiable operations over a vocabulary that ranks divide: the embedding and the loss.

Part of `ntp.ops`, which tells the rules and the letters of the shapes.
"""

from typing import Any

import torch
from ntp_kernels import dispatch as kernels
from torch import Tensor
from torch.autograd import Function

from ntp.collectives import Group
from ntp.weight import Weight

IGNORED = -100
"""Target of a token that has no loss."""

_EXPONENTIALS = 2.0**-40  # unit of the integer sums of exponentials


def embedding(ids: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return the rows [M, D] of weight [U, V, D] for ids i64 [M], whoever holds them."""
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
    return _Embedding.apply(anchor, ids, weight, group)  # type: ignore[return-value]


def token_losses(logits: Tensor, targets: Tensor, head: Weight, vocab_size: int, group: Group) -> Tensor:
    """Return the cross entropy f64 [M] of logits [M, U, V] with targets i64 [M]; 0 where the target is
    IGNORED.

    A non-finite logit in a row makes its loss and its gradients NaN. Backward overwrites the logits with
    their gradient.
    """
    return _TokenLosses.apply(logits, targets, head, vocab_size, group)  # type: ignore[return-value]


class _Embedding(Function):
    """Its input `anchor` is empty and only makes autograd call the backward, the last one of a microbatch."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, weight: Weight, group: Group) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.group = weight, group
        hidden = kernels.embedding(ids, weight.data, weight.first_unit)
        group.all_reduce(hidden.view(torch.int32))
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        ctx.group.exchange.flush()
        kernels.embedding_wgrad(ids, grads[0].contiguous(), weight.first_unit, weight.grad)
        weight.announce_grad()
        return None, None, None, None


class _TokenLosses(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, head: Weight, vocab_size: int, group: Group
    ) -> Tensor:
        first = head.first_unit
        row_max, statistics = kernels.ce_statistics(logits, first, vocab_size)
        group.all_reduce(row_max, "max")
        sums, bits = kernels.ce_sums(logits, row_max, targets, first, vocab_size, statistics)
        both = torch.stack([sums, bits.long()])
        group.all_reduce(both)
        lse = row_max.double() + (both[0].double() * _EXPONENTIALS).log()
        lse = lse.masked_fill_(~row_max.isfinite(), torch.nan)
        ctx.save_for_backward(logits, lse.float(), targets)
        ctx.first_unit, ctx.vocab_size = first, vocab_size
        picked = both[1].to(torch.int32).view(torch.float32).double()
        return (lse - picked).masked_fill_(targets == IGNORED, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, targets = ctx.saved_tensors
        weights, first = grads[0].float(), ctx.first_unit
        dlogits = kernels.ce_backward(logits, lse, targets, first, ctx.vocab_size, logits, weights)
        return dlogits, None, None, None, None
