"""Differentiable operations: kernels, the collectives between them, and their backward.

Invariant: nothing here depends on which rank holds which unit. A contraction that tensor parallelism cuts
goes through `ntp.cut_product`; everything else that ranks combine is a MAX, or an integer SUM in which one
rank has the bits and the others have zeros. Weight gradients are added to `Weight.main_grad` (see
`ntp.weight`).

Shapes: M tokens of a microbatch, D hidden size, U local units, R rows of a unit, G query heads per KV head,
H head size, B width of an FFN unit, V rows of a vocabulary unit.
"""

from typing import Any

import torch
from ntp_kernels import dispatch as kernels
from ntp_kernels.dispatch import adamw, document_bounds, square_sums
from torch import Tensor
from torch.autograd import Function

from ntp.collectives import Group
from ntp.cut_product import add_wgrad, input_grad, start_cut_product
from ntp.exchange import CutExchange
from ntp.vocabulary_ops import IGNORED, embedding, token_losses
from ntp.weight import Weight

__all__ = [
    "IGNORED",
    "adamw",
    "add_rms_norm",
    "attention",
    "column_linear",
    "column_scale",
    "document_bounds",
    "embedding",
    "feed_forward",
    "gather_units",
    "normed_linear",
    "qk_norm_rope",
    "rms_norm",
    "row_linear",
    "square_sums",
    "token_losses",
]


def column_linear(
    x: Tensor, weight: Weight, group: Group, bias: Weight | None = None, last_use: bool = True
) -> Tensor:
    """Return [M, U, R] = x [M, D] times weight [U, R, D] transposed, plus bias [U, R].

    `last_use` is False where a later step of the backward also adds to the gradient of `weight` (a tied
    head).
    """
    return _ColumnLinear.apply(x, weight, group, bias, last_use)  # type: ignore[return-value]


def row_linear(a: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return [M, D] = a [M, U, R] times weight [U, R, D], summed over the units of all ranks.

    Parts of it may still be under way (`ntp.exchange`): `normed_linear` and `feed_forward` wait for each as
    they come to it, others have to wait for the whole.
    """
    return _RowLinear.apply(a, weight, group)  # type: ignore[return-value]


def rms_norm(x: Tensor, weight: Weight, eps: float) -> Tensor:
    """Return RMSNorm of x [M, D]."""
    return _RMSNorm.apply(x, None, weight, eps)[0]  # type: ignore[index]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Weight, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of `x + residual` [M, D], and that sum."""
    return _RMSNorm.apply(x, residual, weight, eps)  # type: ignore[return-value]


def normed_linear(
    x: Tensor,
    residual: Tensor,
    norm: Weight,
    weight: Weight,
    eps: float,
    group: Group,
    bias: Weight | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return [M, U, R] = RMSNorm(x + residual) times weight [U, R, D] transposed, plus bias, and that sum.

    `norm` [D], `bias` [U, R]; the sum [M, D]. In parts of the tokens, so that what ranks exchange of `x`
    hides behind the products of another part. With `recompute`, backward makes the norm's output again.
    """
    return _NormedLinear.apply(x, residual, norm, weight, eps, group, bias, recompute)  # type: ignore[return-value]


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


def attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, seq_len: int, bounds: Tensor | None = None
) -> Tensor:
    """Return causal attention [M, U, G, H] inside sequences of `seq_len` and equal `documents` (i32 [M]).

    `bounds` are their `document_bounds`, if the caller has them.
    """
    return _Attention.apply(q, k, v, documents, seq_len, bounds)  # type: ignore[return-value]


def feed_forward(
    x: Tensor,
    residual: Tensor,
    norm: Weight,
    gate_up: Weight,
    down: Weight,
    eps: float,
    group: Group,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the SwiGLU feed-forward layer of RMSNorm(x + residual), and that sum; all [M, D].

    `norm` [D], `gate_up` [U, 2 B, D], `down` [U, B, D]. In parts of the tokens, so that what ranks exchange
    of one part (of `x`, too) hides behind the products of another; parts of the output may still be under
    way. With `recompute`, backward makes the outputs of norm and SwiGLU again rather than keeping them.
    """
    return _FeedForward.apply(x, residual, norm, gate_up, down, eps, group, recompute)  # type: ignore[return-value]


def column_scale(weight: Weight) -> Tensor:
    """Return the scale [D] by the local units of a sharded weight, for MAX of its int32 bits over ranks."""
    return kernels.column_scale(weight.data)


def gather_units(local: Tensor, weight: Weight, group: Group) -> Tensor:
    """Return all units [total, ...] of a replica from the local [U, ...], which lie as in `weight`."""
    return group.gather_units(local, weight.total_units, weight.first_unit)


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
        (x,), dy, exchange = ctx.saved_tensors, grads[0].contiguous(), ctx.group.exchange
        add_wgrad(dy, x, ctx.weight, exchange, ctx.last_use)
        dx = input_grad(dy, ctx.weight, exchange)
        if ctx.bias is not None:
            _add_bias_grad(dy, ctx.bias)
        return dx, None, None, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Weight, group: Group) -> Tensor:
        ctx.save_for_backward(a)
        ctx.weight, ctx.group = weight, group
        exchange = group.exchange
        output = exchange.output(a.new_empty(a.shape[0], weight.data.shape[2]))
        for rows in exchange.parts(a.shape[0]):
            start_cut_product(a[rows], weight, exchange, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (a,), dy = ctx.saved_tensors, grads[0].contiguous()
        da = kernels.linear(dy, ctx.weight.data)
        ctx.weight.count_product(dy.shape[0])
        add_wgrad(a, dy, ctx.weight, ctx.group.exchange)
        return da, None, None


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
        (x, rstd), (dy, dsummed) = ctx.saved_tensors, grads
        assert dy is not None, "the output of a norm is unused"
        dx = _rms_norm_backward(dy.contiguous(), x, rstd, ctx.weight, dsummed)
        return dx, dx if ctx.has_residual else None, None, None


def _rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Weight, residual_grad: Tensor | None
) -> Tensor:
    dx, dweight = kernels.rms_norm_backward(dy, x, weight.data, rstd, residual_grad)
    weight.grad.add_(dweight)
    weight.announce_grad()
    return dx


class _NormedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        norm: Weight,
        weight: Weight,
        eps: float,
        group: Group,
        bias: Weight | None,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        exchange, tokens = group.exchange, x.shape[0]
        y, summed, rstd = torch.empty_like(x), torch.empty_like(x), x.new_empty(tokens, dtype=torch.float32)
        out, offset = x.new_empty(tokens, *weight.data.shape[:2]), None if bias is None else bias.data
        for rows in exchange.parts(tokens):
            exchange.wait(x, rows)
            normed = y[rows], summed[rows], rstd[rows]
            kernels.add_rms_norm(x[rows], residual[rows], norm.data, eps, normed)
            kernels.linear(y[rows], weight.data, offset, out=out[rows])
        weight.count_product(tokens)
        ctx.save_for_backward(summed, rstd, None if recompute else y)
        ctx.norm, ctx.weight, ctx.group, ctx.bias, ctx.eps = norm, weight, group, bias, eps
        ctx.set_materialize_grads(False)
        return out, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (summed, rstd, y), (dout, dsummed), norm = ctx.saved_tensors, grads, ctx.norm
        assert dout is not None, "the output of a projection is unused"
        dout = dout.contiguous()
        exchange = ctx.group.exchange
        dx = _normed_linear_backward(dout, y, summed, rstd, norm, ctx.eps, ctx.weight, exchange, dsummed)
        if ctx.bias is not None:
            _add_bias_grad(dout, ctx.bias)
        return dx, dx, None, None, None, None, None, None


def _normed_linear_backward(
    dout: Tensor,
    y: Tensor | None,
    summed: Tensor,
    rstd: Tensor,
    norm: Weight,
    eps: float,
    weight: Weight,
    exchange: CutExchange,
    dsummed: Tensor | None,
    norms: Tensor | None = None,
) -> Tensor:
    """The gradient of `summed`, whose norm is `y` (None: made again); `norms` are those of `dout`."""
    y = kernels.rms_norm(summed, norm.data, eps)[0] if y is None else y
    add_wgrad(dout, y, weight, exchange)
    return _rms_norm_backward(input_grad(dout, weight, exchange, norms), summed, rstd, norm, dsummed)


def _add_bias_grad(dy: Tensor, bias: Weight) -> None:
    kernels.bias_grad(dy, bias.grad)
    bias.announce_grad()


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
            partials = torch.stack([dq_scale, dk_scale], 1)
            _add_unit_partials(partials, ctx.norms, ctx.units, ctx.group.exchange)
        return dqkv, None, None, None, None, None, None


def _add_unit_partials(
    partials: Tensor, norms: tuple[Weight, Weight], units: Weight, exchange: CutExchange
) -> None:
    """Add the partial gradients f32 [U, 2, H] of all ranks' units, in unit order, to the two weights."""
    every = exchange.gather(partials.flatten(1), units.total_units, units.first_unit)
    totals = every.view(-1, *partials.shape[1:]).sum(0)
    for weight, total in zip(norms, totals, strict=True):
        weight.grad.add_(total)
        weight.announce_grad()


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor,
        seq_len: int,
        bounds: Tensor | None,
    ) -> Tensor:
        ctx.seq_len, ctx.scale = seq_len, q.shape[3] ** -0.5
        out, lse = kernels.attention(q, k, v, documents, seq_len, ctx.scale, bounds)
        ctx.save_for_backward(q, k, v, out, lse, documents, bounds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = grads[0].contiguous()
        q, k, v, out, lse, documents, bounds = ctx.saved_tensors
        dq, dk, dv = kernels.attention_backward(
            dout, q, k, v, out, lse, documents, ctx.seq_len, ctx.scale, bounds
        )
        return dq, dk, dv, None, None, None


class _FeedForward(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        norm: Weight,
        gate_up: Weight,
        down: Weight,
        eps: float,
        group: Group,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        exchange, tokens, (units, width) = group.exchange, x.shape[0], down.data.shape[:2]
        y, summed, rstd = torch.empty_like(x), torch.empty_like(x), x.new_empty(tokens, dtype=torch.float32)
        gates, a = x.new_empty(tokens, units, 2, width), x.new_empty(tokens, units, width)
        output = exchange.output(x)
        for rows in exchange.parts(tokens):
            exchange.wait(x, rows)
            normed = y[rows], summed[rows], rstd[rows]
            kernels.add_rms_norm(x[rows], residual[rows], norm.data, eps, normed)
            kernels.linear(y[rows], gate_up.data, out=gates[rows].flatten(2))
            gate_up.count_product(rows.stop - rows.start)
            _, norms = kernels.swiglu_with_norms(gates[rows], a[rows])
            start_cut_product(a[rows], down, exchange, output, rows, norms)
        ctx.save_for_backward(summed, rstd, gates, *((None, None) if recompute else (y, a)))
        ctx.weights, ctx.group, ctx.eps = (norm, gate_up, down), group, eps
        ctx.set_materialize_grads(False)
        return output, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (summed, rstd, gates, y, a), (norm, gate_up, down) = ctx.saved_tensors, ctx.weights
        exchange, (dy, dsummed) = ctx.group.exchange, grads
        assert dy is not None, "the output of a feed-forward layer is unused"
        dy = dy.contiguous()
        da = kernels.linear(dy, down.data)
        down.count_product(dy.shape[0])
        add_wgrad(kernels.swiglu(gates) if a is None else a, dy, down, exchange)
        dgates, norms = kernels.swiglu_backward_with_norms(da, gates)
        dgates = dgates.flatten(2)
        dx = _normed_linear_backward(
            dgates, y, summed, rstd, norm, ctx.eps, gate_up, exchange, dsummed, norms
        )
        return dx, dx, None, None, None, None, None, None
