"""RMSNorm, plain or after a residual add, forward and backward, for activations [M, D].

Legend: M tokens of one call, D hidden size. bf16 or f32 in and out, fp32 inside.

What moves no bits: a row is one program's work and its sum has one order, set by D alone, so `y`, `summed`,
`rstd` and `dx` of a row do not depend on the other rows of the call, on M or on the card's multiprocessor
count. The weight gradient is folded in two fixed steps: the rows of one block of `TOKEN_BLOCK` tokens, then
the blocks of a call by `fold_token_blocks`. It has no atomics. A trainer that shards the tokens keeps the
bits by handing whole token blocks to `rms_norm_backward_blocks` and folding all of them at once.

Left out: a bias and a mean (no Llama-like model has them); D above 32768 (a row would not fit in registers).
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

TOKEN_BLOCK = 32
"""Tokens whose weight gradient one program folds. Part of the numerics: changing it changes the bits."""

_FOLD_ROWS = 256
_FOLD_COLUMNS = 16
_BACKWARD_TILE = 16384
_MAX_WIDTH = 32768


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `y = x * rstd * weight` [M, D] and `rstd = (mean(x^2) + eps)^-1/2` f32 [M].

    Order: one sum over D per row, a tree that depends on D only. Product in fp32, one rounding to the dtype
    of x.
    """
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    width, warps = _shape(x)
    _forward_kernel[(x.shape[0],)](
        x, x, weight, y, y, rstd, eps, D=x.shape[1], WIDTH=width, ADD=False, num_warps=warps
    )
    return y, rstd


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `y, summed, rstd`: `summed = x + residual` [M, D] in the compute dtype, then its RMSNorm.

    The norm sees the rounded sum, so a recomputation from `summed` gives the same bits. Orders as in
    `rms_norm`. `out`, three contiguous tensors, receives the results.
    """
    assert residual.shape == x.shape
    assert residual.is_contiguous()
    if out is None:
        out = torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    y, summed, rstd = out
    width, warps = _shape(x)
    _forward_kernel[(x.shape[0],)](
        x, residual, weight, y, summed, rstd, eps, D=x.shape[1], WIDTH=width, ADD=True, num_warps=warps
    )
    return y, summed, rstd


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    residual_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `dx` [M, D] and `dweight` f32 [D]; `residual_grad` [M, D] joins `dx` before the one rounding.

    For `add_rms_norm` pass `summed` as x and the gradient of `summed` as `residual_grad`.
    Order of dweight: see `rms_norm_backward_blocks` and `fold_token_blocks`.
    """
    dx, partial = rms_norm_backward_blocks(dy, x, weight, rstd, residual_grad)
    return dx, fold_token_blocks(partial)


def rms_norm_backward_blocks(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    residual_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `dx` [M, D] and the weight gradient of every token block, f32 [ceil(M / TOKEN_BLOCK), D].

    Order: the products `dy * x * rstd` of as many consecutive rows as fit a tile (a number set by D) by one
    fixed tree, tiles of the block left to right from zero.
    """
    assert dy.shape == x.shape
    assert dy.is_contiguous()
    tokens, hidden = x.shape
    blocks = triton.cdiv(tokens, TOKEN_BLOCK)
    dx, partial = torch.empty_like(x), x.new_empty(blocks, hidden, dtype=torch.float32)
    width, _ = _shape(x)
    step = min(max(_BACKWARD_TILE // width, 1), TOKEN_BLOCK)
    extra = dy if residual_grad is None else residual_grad
    assert extra.shape == x.shape
    assert extra.is_contiguous()
    _backward_kernel[(blocks,)](
        dy, x, weight, rstd, extra, dx, partial, tokens,
        D=hidden, WIDTH=width, ROWS=TOKEN_BLOCK, STEP=step,
        ADD=residual_grad is not None, num_warps=min(max(step * width // 1024, 1), 16),
    )  # fmt: skip
    return dx, partial


def fold_token_blocks(partial: torch.Tensor) -> torch.Tensor:
    """Sum f32 [blocks, N] over the blocks to f32 [N].

    Order: runs of 256 consecutive blocks (short last run padded with zeros) by one fixed tree, runs left to
    right.
    """
    blocks, columns = partial.shape
    out = partial.new_empty(columns)
    _fold_kernel[(triton.cdiv(columns, _FOLD_COLUMNS),)](
        partial, out, blocks, columns, ROWS=_FOLD_ROWS, COLUMNS=_FOLD_COLUMNS, num_warps=4
    )
    return out


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    x, residual, weight = (pattern((40, 256), device, seed) for seed in (11, 12, 13))
    y, summed, rstd = add_rms_norm(x, residual, weight[0], 1e-5)
    yield from (y, summed, rstd, *rms_norm_backward(residual, summed, weight[0], rstd, x))


def _shape(x: torch.Tensor) -> tuple[int, int]:
    """Return the power of two that holds a row of x [M, D] and the warps for it: functions of D alone."""
    assert x.ndim == 2
    assert x.is_contiguous()
    assert x.shape[1] <= _MAX_WIDTH
    assert x.shape[1] % 16 == 0
    width = triton.next_power_of_2(x.shape[1])
    return width, min(max(width // 1024, 1), 16)


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr, rstd_ptr, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    x = tl.load(x_ptr + row * D + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * D + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + row * D + columns, x, mask=inside)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * rstd * weight
    tl.store(y_ptr + row * D + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, extra_ptr, dx_ptr, partial_ptr, tokens,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for step in range(0, ROWS, STEP):
        row = block * ROWS + step + tl.arange(0, STEP)
        live = row < tokens
        offsets = row[:, None] * D + columns[None, :]
        mask = live[:, None] & inside[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)[:, None]
        normed = x * rstd
        scaled = dy * weight[None, :]
        dx = rstd * (scaled - normed * (tl.sum(scaled * normed, axis=1) / D)[:, None])
        if ADD:
            dx += tl.load(extra_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += tl.sum(dy * normed, axis=0)
    tl.store(partial_ptr + block * D + columns, total, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def _fold_kernel(partial_ptr, out_ptr, blocks, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        offsets = row[:, None].to(tl.int64) * columns + column[None, :]
        part = tl.load(partial_ptr + offsets, mask=(row < blocks)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(part, axis=0)
    tl.store(out_ptr + column, total, mask=inside)
