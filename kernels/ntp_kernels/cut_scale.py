"""Scales of a cut contraction: how large a partial sum can get, and the way back from its integers.

Legend: M tokens, D hidden size, U local units, R rows per unit; a block is 32 rows of a unit (16 where 32 do
not divide).

Inside a segment s, |partial sum| <= sum over its blocks |a_i,block| |b_j,block| <= (sum_s |a_i,block|) max
|b_j,block|: 2-norms inside a block, so that random signs count; their sum over blocks and the largest block
outside, so that an outlier of 300 weighs as much as it must and no more (a 2-norm over the whole segment
would triple it). The row's side is `row_norms` f32 [U, M], one number per unit: the caller gathers it over
ranks along the first dimension, in unit order, and `row_scale` adds the units of each segment in one fixed
tree. That is 4 M U bytes in all, 3 % of the integers that follow for a Llama-3-8B FFN. The column's side
`column_scale` f32 [D] combines over ranks by MAX.

Everything keeps NaN and infinity: a row or column that holds one has the norm NaN and finishes as NaN. A norm
beyond float32 is infinite and finishes as infinity, a zero norm as exact zeros.
"""
# Triton's signatures do not describe what a jitted function accepts.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .gemm_plain import NEVER

SEGMENT = 2048
"""Longest segment of the contraction, unless a unit is longer. Part of the numerics: it sets the grid."""
LONG_CONTRACTION = 65536
"""Beyond it segments are half as long: they must leave more room for drift. Part of the numerics."""
DRIFT = 4.0
"""How far a chain may drift before its integer is banked, over the bound of a random walk; in practice 5
standard deviations, since the bound takes the largest block of a column for all. Part of the numerics."""
LEAST_ALLOWANCE = 0.25
"""Of several segments: room for outliers, which drift further than a random walk. Part of the numerics."""
LONG_LEAST_ALLOWANCE = 1.0
"""The same of a long contraction, whose rows may be one large element and a tail, as gradients of logits are:
that element alone then takes the chain as far as the segment's bound, and nothing strays."""
CROSSING = 4
"""Segments of a long contraction between changes of a chain's sign. Part of the numerics."""
SLACK = 1.0006
"""On either norm: covers their rounding, that of their product and the floor of 128 steps."""


def is_long(total_units: int, unit_rows: int) -> bool:
    """Whether a contraction over all ranks has the segments, allowance and signs of a long one."""
    return total_units * unit_rows > LONG_CONTRACTION


def segment_units(total_units: int, unit_rows: int) -> int:
    """Whole units in one segment."""
    longest = SEGMENT // 2 if is_long(total_units, unit_rows) else SEGMENT
    return max(1, longest // unit_rows)


def crossing_period(total_units: int, unit_rows: int) -> int:
    """Segments after which chains cross to the other side of zero."""
    return CROSSING if is_long(total_units, unit_rows) else NEVER


class RowScale(NamedTuple):
    """Scale of the rows of `a`: bound f32 [M], which leaves room for drift, and that room, window i32 [M].

    A chain may stray from its start by `window` units where a segment ends, and the next segment still cannot
    carry it out of its exponent. A sum of K products drifts like a random walk, by DRIFT / sqrt(K) of the
    bound of the whole contraction: for a Gaussian row of 14336, 0.25 of a segment's bound.
    """

    bound: torch.Tensor
    window: torch.Tensor


def row_norms(a: torch.Tensor) -> torch.Tensor:
    """Return f32 [U, M]: the sum over blocks of 2-norms in every row of a [M, U, R]; NaN for NaN, infinity.

    Order: a tree inside a block, a tree over the blocks of a unit.
    """
    m, units, width = a.shape
    norms = a.new_empty(units, m, dtype=torch.float32)
    padded = triton.next_power_of_2(width)
    rows = max(1, 2048 // padded)
    _row_norms_kernel[(triton.cdiv(m, rows), units)](
        a, norms, m, units, WIDTH=width, PADDED=padded, ROWS=rows, BLOCK=_block(width),
        num_warps=max(2, padded // 1024),
    )  # fmt: skip
    return norms


def row_scale(norms: torch.Tensor, unit_rows: int) -> RowScale:
    """Return the scale of the rows from their norms f32 [total units, M] over all units.

    A row's bound times a column's bounds every partial sum inside a segment, and leaves the allowance.
    """
    total_units, m = norms.shape
    bound, window = norms.new_empty(m), norms.new_empty(m, dtype=torch.int32)
    per_segment = segment_units(total_units, unit_rows)
    drift = DRIFT / (total_units * unit_rows) ** 0.5
    least = LONG_LEAST_ALLOWANCE if is_long(total_units, unit_rows) else LEAST_ALLOWANCE
    padded = triton.next_power_of_2(per_segment)
    rows = max(16, 2048 // padded)
    _row_scale_kernel[(triton.cdiv(m, rows),)](
        norms, bound, window, m, total_units, SLACK, drift, least,
        PER_SEGMENT=per_segment, PADDED=padded, ROWS=rows, SEVERAL=total_units > per_segment,
    )  # fmt: skip
    return RowScale(bound, window)


def column_scale(w: torch.Tensor) -> torch.Tensor:
    """Return f32 [D], for MAX over ranks: the largest block norm in every column of w [U, R, D]; NaN alike.

    Order: a tree inside a block; a maximum has none.
    """
    units, height, d = w.shape
    norms = w.new_empty(units, d, dtype=torch.float32)
    _column_norms_kernel[(triton.cdiv(d, 64), units)](
        w, norms, d, HEIGHT=height, ROWS=128, COLUMNS=64, BLOCK=_block(height)
    )
    return norms.amax(0).mul_(SLACK)  # both keep NaN


def finish(
    total: torch.Tensor,
    row_scale: RowScale,
    column_scale: torch.Tensor,
    total_units: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [M, D] in `dtype` of the sum over ranks of `cut_matmul`: total i32 [M, D] times the grid's unit.

    A total [P, M, D] is summed over P first; `out` [M, D], contiguous, receives the result. `total_units` is
    not needed: the scales carry it. It is here for the twin in `ntp_kernels.reference`.
    """
    del total_units
    m, d = total.shape[-2:]
    assert total.stride()[-2:] == (d, 1)
    step = total.stride(0) if total.dim() == 3 else 0
    out = total.new_empty(m, d, dtype=dtype) if out is None else out
    columns = min(4096, triton.next_power_of_2(d))
    rows = 4096 // columns
    _finish_kernel[(triton.cdiv(m, rows), triton.cdiv(d, columns))](
        total, row_scale.bound, column_scale, out, m, d, step,
        PIECES=total.numel() // (m * d), ROWS=rows, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return out


def _block(unit_rows: int) -> int:
    return 32 if unit_rows % 32 == 0 else 16


@triton.jit
def _inverse(field):
    """2^(127 - field): takes the largest element to [1, 2)."""
    return ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _field(largest_bits):
    """Exponent field of bf16 bits without sign, inside what `_inverse` can invert."""
    return tl.minimum(tl.maximum(largest_bits >> 7, 1), 253)


@triton.jit
def largest_bits(a):
    """The largest element of every row of bf16 a [ROWS, COLUMNS], as bits without sign."""
    return tl.max(a.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, 1)


@triton.jit
def scaled_block_norms(a, largest, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """2-norms [ROWS, COLUMNS / BLOCK] of the blocks of bf16 a, scaled by the exponent of `largest`."""
    scaled = a.to(tl.float32) * _inverse(_field(largest))[:, None]
    return tl.sqrt_rn(tl.sum((scaled * scaled).reshape(ROWS, COLUMNS // BLOCK, BLOCK), 2))


@triton.jit
def scaled_back(norm, largest):
    """Sums of `scaled_block_norms` as they are; NaN where a row has NaN or infinity."""
    norm = norm * (_field(largest) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest >= 0x7F80, float("nan"), norm)


@triton.jit(do_not_specialize=["M", "units"])
def _row_norms_kernel(
    a_ptr, norms_ptr, M, units,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(1)
    columns = tl.arange(0, PADDED)
    inside = (rows[:, None] < M) & (columns[None, :] < WIDTH)
    offsets = (rows[:, None].to(tl.int64) * units + unit) * WIDTH + columns[None, :]
    a = tl.load(a_ptr + offsets, mask=inside, other=0.0)
    largest = largest_bits(a)
    norm = tl.sum(scaled_block_norms(a, largest, ROWS, PADDED, BLOCK), 1)
    tl.store(norms_ptr + unit.to(tl.int64) * M + rows, scaled_back(norm, largest), mask=rows < M)


@triton.jit(do_not_specialize=["D"])
def _column_norms_kernel(
    w_ptr, norms_ptr, D, HEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    unit = tl.program_id(1)
    base = w_ptr + unit.to(tl.int64) * HEIGHT * D + columns[None, :]
    result = tl.zeros((COLUMNS,), tl.float32)
    bits = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, HEIGHT, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        w = tl.load(base + rows.to(tl.int64) * D, mask=(rows < HEIGHT) & (columns[None, :] < D), other=0.0)
        largest = tl.max(w.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, 0)
        field = _field(largest)
        scaled = w.to(tl.float32) * _inverse(field)[None, :]
        squares = tl.sum((scaled * scaled).reshape(ROWS // BLOCK, BLOCK, COLUMNS), 1)
        norm = tl.sqrt_rn(tl.max(squares, 0)) * (field << 23).to(tl.float32, bitcast=True)
        result = tl.maximum(result, norm)
        bits = tl.maximum(bits, largest)
    result = tl.where(bits >= 0x7F80, float("nan"), result)
    tl.store(norms_ptr + unit.to(tl.int64) * D + columns, result, mask=columns < D)


@triton.jit(do_not_specialize=["M", "total_units", "slack", "drift", "least"])
def _row_scale_kernel(
    norms_ptr, bound_ptr, window_ptr, M, total_units, slack, drift, least,
    PER_SEGMENT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    members = tl.arange(0, PADDED)[:, None]
    largest = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, total_units, PER_SEGMENT):
        inside = (members < PER_SEGMENT) & (first + members < total_units) & (rows[None, :] < M)
        offsets = (first + members).to(tl.int64) * M + rows[None, :]
        segment = tl.sum(tl.load(norms_ptr + offsets, mask=inside, other=0.0), 0)
        largest = tl.maximum(largest, segment)
        total += segment  # keeps NaN, which the maximum may not
    allowance = tl.zeros((ROWS,), tl.float32)
    if SEVERAL:
        share = tl.div_rn(total, tl.where(largest > 0.0, largest, 1.0).to(tl.float32))
        share = tl.where(share == share, share, 1.0)  # of infinities
        allowance = tl.minimum(tl.maximum(share * drift, least), 2.0)
    bound = tl.where(total != total, total, largest * slack * (1.0 + allowance))
    tl.store(bound_ptr + rows, bound, mask=rows < M)
    window = (4194304.0 * (allowance / (1.0 + allowance))).to(tl.int32)
    tl.store(window_ptr + rows, window, mask=rows < M)


@triton.jit(do_not_specialize=["M", "step"])
def _finish_kernel(
    total_ptr, row_ptr, column_ptr, out_ptr, M, D, step,
    PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """total * 2^(E - 23), E = floor(log2(row * column)) + 2; zero, infinity and NaN as the scales say."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < D)
    offsets = rows[:, None].to(tl.int64) * D + columns[None, :]
    row = tl.load(row_ptr + rows, mask=rows < M, other=0.0)[:, None]
    column = tl.load(column_ptr + columns, mask=columns < D, other=0.0)[None, :]
    total = tl.load(total_ptr + offsets, mask=inside, other=0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(total_ptr + (step.to(tl.int64) * piece + offsets), mask=inside, other=0)
    total = total.to(tl.float32)
    bound = row * column
    field = bound.to(tl.int32, bitcast=True) >> 23
    unit = ((tl.minimum(field, 252) + 2) << 23).to(tl.float32, bitcast=True)
    value = (total * 1.1920928955078125e-07) * unit
    value = tl.where(field >= 252, float("inf"), value)
    value = tl.where((row == 0.0) | (column == 0.0), 0.0, value)
    value = tl.where((row != row) | (column != column), float("nan"), value)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)
