"""Differentiable operations: kernels, the collectives between them, and their backward. Only importer of
the kernels.

Invariant: nothing here depends on which rank holds which unit. A contraction that tensor parallelism cuts
goes through `_cut_product`; everything else that ranks combine is a MAX, or an integer SUM in which one
rank has the bits and the others have zeros. Weight gradients are added to `Weight.main_grad` (see
`ntp.weight`).

Shapes: M tokens of a microbatch, D hidden size, U local units, R rows of a unit, G query heads per KV head,
H head size, B width of an FFN unit, V rows of a vocabulary unit.
"""

from typing import Any

import torch
from ntp_kernels import dispatch as kernels
from ntp_kernels.dispatch import adamw, square_sums
from torch import Tensor
from torch.autograd import Function

from ntp.collectives import Group
from ntp.weight import Weight

__all__ = [
    "IGNORED",
    "adamw",
    "add_rms_norm",
    "attention",
    "column_exponents",
    "column_linear",
    "embedding",
    "gather_units",
    "qk_norm_rope",
    "rms_norm",
    "row_linear",
    "square_sums",
    "swiglu",
    "token_losses",
]

IGNORED = -100
"""Target of a token that has no loss."""

_EXPONENTIALS = 2.0**-40  # unit of the integer sums of exponentials


def column_linear(
    x: Tensor, weight: Weight, group: Group, bias: Weight | None = None, last_use: bool = True
) -> Tensor:
    """Return [M, U, R] = x [M, D] times weight [U, R, D] transposed, plus bias [U, R].

    `last_use` is False where a later step of the backward also adds to the gradient of `weight` (a tied
    head).
    """
    return _ColumnLinear.apply(x, weight, group, bias, last_use)  # type: ignore[return-value]


def row_linear(a: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return [M, D] = a [M, U, R] times weight [U, R, D], summed over the units of all ranks."""
    return _RowLinear.apply(a, weight, group)  # type: ignore[return-value]


def embedding(ids: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return the rows [M, D] of weight [U, V, D] for ids i64 [M], whoever holds them."""
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
    return _Embedding.apply(anchor, ids, weight, group)  # type: ignore[return-value]


def rms_norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """Return RMSNorm of x [M, D]."""
    return _RMSNorm.apply(x, None, weight, eps)[0]  # type: ignore[index]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Weight, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of `x + residual` [M, D], and that sum."""
    return _RMSNorm.apply(x, residual, weight, eps)  # type: ignore[return-value]


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Weight, Weight] | None,
    eps: float,
    units: Weight,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q [M, U, G, H], rotated k [M, U, H] and v [M, U, H] of qkv [M, U, G+2, H].

    `tables` are cos and sin, f32 [P, H/2]; `norms` the QK-norm weights [H] of queries and keys; `units` is
    a weight with the same units as `qkv`.
    """
    return _QKNormRope.apply(qkv, positions, tables, norms, eps, units, group)  # type: ignore[return-value]


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, seq_len: int) -> Tensor:
    """Return causal attention [M, U, G, H] inside sequences of `seq_len` and equal `documents` (i32 [M])."""
    return _Attention.apply(q, k, v, documents, seq_len)  # type: ignore[return-value]


def swiglu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [M, U, B] of gate_up [M, U, 2, B]."""
    return _SwiGLU.apply(gate_up)  # type: ignore[return-value]


def token_losses(logits: Tensor, targets: Tensor, head: Weight, vocab_size: int, group: Group) -> Tensor:
    """Return the cross entropy f64 [M] of logits [M, U, V] with targets i64 [M]; 0 where the target is
    IGNORED.

    A non-finite logit in a row makes its loss and its gradients NaN.
    """
    return _TokenLosses.apply(logits, targets, head, vocab_size, group)  # type: ignore[return-value]


def column_exponents(weight: Weight) -> Tensor:
    """Return i32 [D] of the local units of a sharded weight, to be combined over ranks by MAX."""
    return kernels.column_exponent(weight.data)


def gather_units(local: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return all units [total, ...] of a replica from every rank's local f32 [U, ...], which lie as in
    `weight`.

    An integer SUM of bit patterns: exact, -0.0 and NaN included.
    """
    bits = torch.zeros(weight.total_units, *local.shape[1:], dtype=torch.int32, device=local.device)
    bits[weight.first_unit : weight.first_unit + local.shape[0]] = local.contiguous().view(torch.int32)
    group.all_reduce(bits)
    return bits.view(torch.float32)


def _cut_product(a: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return [M, D] = a [M, U, R] times weight [U, R, D] over the units of all ranks, in the dtype of `a`."""
    rows, columns, units = kernels.row_exponent(a), weight.exponent, weight.total_units
    group.all_reduce(rows, "max")
    weight.count_product(a.shape[0])
    total = kernels.cut_matmul(a, weight.data, rows, columns, units, weight.first_unit)
    group.all_reduce(total)
    return kernels.finish(total, rows, columns, units, a.dtype)


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, group: Group, bias: Weight | None, last_use: bool
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.group, ctx.bias, ctx.last_use = weight, group, bias, last_use
        weight.count_product(x.shape[0])
        return kernels.linear(x, weight.data, bias.data if bias is not None else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = _cut_product(dy, ctx.weight, ctx.group)
        kernels.linear_wgrad(dy, x, ctx.weight.grad)
        ctx.weight.count_product(x.shape[0])
        if ctx.last_use:
            ctx.weight.announce_grad()
        if ctx.bias is not None:
            kernels.bias_grad(dy, ctx.bias.grad)
            ctx.bias.announce_grad()
        return dx, None, None, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Weight, group: Group) -> Tensor:
        ctx.save_for_backward(a)
        ctx.weight = weight
        return _cut_product(a, weight, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a,), dy = ctx.saved_tensors, grads[0].contiguous()
        da = kernels.linear(dy, ctx.weight.data)
        kernels.linear_wgrad(a, dy, ctx.weight.grad)
        ctx.weight.count_product(2 * dy.shape[0])
        ctx.weight.announce_grad()
        return da, None, None


class _Embedding(Function):
    """Its input `anchor` is empty and only makes autograd call the backward, the last one of a microbatch."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, weight: Weight, group: Group) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        hidden = kernels.embedding(ids, weight.data, weight.first_unit)
        group.all_reduce(hidden.view(torch.int32))
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        kernels.embedding_wgrad(ids, grads[0].contiguous(), weight.first_unit, weight.grad)
        weight.announce_grad()
        return None, None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Weight, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        if residual is None:
            (y, rstd), summed = kernels.rms_norm(x, weight.data, eps), None
        else:
            y, summed, rstd = kernels.add_rms_norm(x, residual, weight.data, eps)
        ctx.save_for_backward(x if summed is None else summed, rstd)
        ctx.weight, ctx.has_residual = weight, residual is not None
        ctx.set_materialize_grads(False)
        return y, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, rstd), weight, (dy, dsummed) = ctx.saved_tensors, ctx.weight, grads
        assert dy is not None, "the output of a norm is unused"
        dx, dweight = kernels.rms_norm_backward(dy.contiguous(), x, weight.data, rstd, dsummed)
        weight.grad.add_(dweight)
        weight.announce_grad()
        return dx, dx if ctx.has_residual else None, None, None


class _QKNormRope(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor],
        norms: tuple[Weight, Weight] | None,
        eps: float,
        units: Weight,
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_scale, k_scale = (None, None) if norms is None else (norms[0].data, norms[1].data)
        q, k, v, rstd = kernels.qk_norm_rope(qkv, positions, *tables, q_scale, k_scale, eps)
        ctx.save_for_backward(qkv, positions, *tables, rstd)
        ctx.norms, ctx.scales, ctx.units, ctx.group = norms, (q_scale, k_scale), units, group
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, positions, cos, sin, rstd = ctx.saved_tensors
        dq, dk, dv = (grad.contiguous() for grad in grads)
        q_scale, k_scale = ctx.scales
        dqkv, dq_scale, dk_scale = kernels.qk_norm_rope_backward(
            dq, dk, dv, qkv, positions, cos, sin, q_scale, k_scale, rstd
        )
        if ctx.norms is not None:
            assert dq_scale is not None
            assert dk_scale is not None
            _add_unit_partials(torch.stack([dq_scale, dk_scale], 1), ctx.norms, ctx.units, ctx.group)
        return dqkv, None, None, None, None, None, None


def _add_unit_partials(partials: Tensor, norms: tuple[Weight, Weight], units: Weight, group: Group) -> None:
    """Add the partial gradients f32 [U, 2, H] of all ranks' units, in unit order, to the two weights."""
    totals = gather_units(partials, units, group).sum(0)
    for weight, total in zip(norms, totals, strict=True):
        weight.grad.add_(total)
        weight.announce_grad()


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, seq_len: int) -> Tensor:
        ctx.seq_len, ctx.scale = seq_len, q.shape[3] ** -0.5
        out, lse = kernels.attention(q, k, v, documents, seq_len, ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = grads[0].contiguous()
        q, k, v, out, lse, documents = ctx.saved_tensors
        dq, dk, dv = kernels.attention_backward(dout, q, k, v, out, lse, documents, ctx.seq_len, ctx.scale)
        return dq, dk, dv, None, None


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return kernels.swiglu_backward(grads[0].contiguous(), gate_up)


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
        dlogits = kernels.ce_backward(logits, lse, targets, ctx.first_unit, ctx.vocab_size)
        return dlogits.mul_(grads[0].to(dlogits.dtype)[:, None, None]), None, None, None, None
