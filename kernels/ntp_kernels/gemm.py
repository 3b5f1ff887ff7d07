"""The three matrix products of the trainer, for units of rows, in bf16 with fp32 accumulation.

Legend: M tokens, D hidden size, U local units, R rows per unit.

`linear` contracts D, which no mesh cuts; `linear_wgrad` contracts the tokens; `cut_matmul` contracts the
units, which tensor parallelism cuts, in integers (`cut.py`). Invariant: an output element depends on its row
and column alone, as one chain of k16 steps in ascending k, never on M, U, the tile or the card's size.

Left out: float32 operands (the CPU twins have them), shapes whose D or R is no multiple of 16.
"""
# Triton's signatures do not describe what a jitted function accepts.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from . import gemm_plain
from .cut import (
    RowScale,
    column_scale,
    cut_matmul,
    finish,
    row_norms,
    row_scale,
)
from .tuning import PLAIN, Op, Tile, choose

__all__ = [
    "RowScale",
    "bias_grad",
    "column_scale",
    "cut_matmul",
    "finish",
    "linear",
    "linear_wgrad",
    "row_norms",
    "row_scale",
]


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y [M, U, R] = x [M, D] times w [U, R, D] transposed, plus bias [U, R], rounded once.

    `tile` overrides the tuned one and moves no bits; `out`, contiguous, receives the result.
    """
    m, d = x.shape
    units, rows = w.shape[:2]
    assert w.shape[2] == d
    assert x.is_contiguous()
    assert w.is_contiguous()
    out = x.new_empty(m, units * rows, dtype=out_dtype) if out is None else out.view(m, units * rows)
    flat = w.view(units * rows, d)
    tuned = bias is None and out.dtype == torch.bfloat16
    tile = tile or (_tile("linear", out, d) if tuned else PLAIN)
    if not tuned or tile.kernel == "plain":
        plain = tile if tile.kernel == "plain" else PLAIN
        gemm_plain.linear(x, flat, out, plain, None if bias is None else bias.reshape(-1))
    else:
        from .gemm_hopper import multiply  # imports Gluon, which only the card it is for needs

        multiply(x, flat, out, tile, "store", a_transposed=False, b_transposed=True)
    return out.view(m, units, rows)


def linear_wgrad(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *, tile: Tile | None = None) -> None:
    """Add dy [M, U, R] transposed times x [M, D] to out f32 [U, R, D].

    Order: all tokens in one fp32 chain, then one addition. `tile` overrides the tuned one; it moves no bits.
    """
    m, units, rows = dy.shape
    assert out.dtype == torch.float32
    assert out.shape == (units, rows, x.shape[1])
    assert all(tensor.is_contiguous() for tensor in (dy, x, out))
    flat_dy, flat_out = dy.view(m, units * rows), out.view(units * rows, x.shape[1])
    tile = tile or _tile("wgrad", flat_out, m)
    if tile.kernel == "plain":
        gemm_plain.wgrad(flat_dy, x, flat_out, tile)
    else:
        from .gemm_hopper import multiply

        multiply(flat_dy, x, flat_out, tile, "add", a_transposed=True, b_transposed=False)


def bias_grad(dy: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum over tokens of dy [M, U, R] to out f32 [U, R].

    Order: tokens of equal index modulo 64 in ascending order, then a tree over the 64, then one addition.
    """
    m, columns = dy.shape[0], out.numel()
    _bias_grad_kernel[(triton.cdiv(columns, 32),)](dy, out, m, columns, ROWS=64, COLUMNS=32)


@triton.jit(do_not_specialize=["M"])
def _bias_grad_kernel(dy_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, M, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        inside = (rows < M) & (columns[None, :] < N)
        sums += tl.load(dy_ptr + rows.to(tl.int64) * N + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    total = tl.load(out_ptr + columns, mask=columns < N, other=0.0) + tl.sum(sums, 0)
    tl.store(out_ptr + columns, total, mask=columns < N)


def _tile(op: Op, out: torch.Tensor, k: int) -> Tile:
    """The tuned tile on Hopper, the plain one elsewhere."""
    if out.device.type == "cpu" or torch.cuda.get_device_capability(out.device) != (9, 0):
        return PLAIN
    return choose(op, (out.shape[0], out.shape[1], k), torch.cuda.get_device_name(out.device))
