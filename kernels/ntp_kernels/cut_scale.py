"""Scales of a cut contraction: norms of rows and columns, the grid they give, and the way back from its integers.

Legend: M tokens, D hidden size, U local units, R rows per unit.

Statistics are per unit, so that they depend on no cut: `row_norms` f32 [U, M] and `column_norms` f32 [U, D]. The caller
gathers them over ranks along the first dimension, in unit order; `row_scale` and `column_scale` then sum squares over
the units of a segment in one fixed tree and take the largest segment. Gathering costs 4 M U bytes in all, 3 % of the integers that
follow for a Llama-3-8B FFN. The coarser `row_exponent` and `column_exponent` are int32 [M] and [D] and combine by MAX;
they bound a segment by its largest unit, which costs accuracy where one unit holds an outlier.

Everything keeps NaN and infinity: a row or column that holds one has the norm NaN and finishes as NaN. A norm beyond
float32 is infinite and finishes as infinity, a zero norm as exact zeros.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

SEGMENT = 2048
"""Longest segment of the contraction, unless a unit is longer. Part of the numerics: it sets the grid."""
DRIFT = 5.0
"""Standard deviations that a chain may drift from its start before it is redone. Part of the numerics."""
SLACK = 1.0006
"""On either norm: covers their rounding, that of their product and the floor of 128 steps."""
POISON = 1 << 20
"""Exponent of a row or column with a NaN or an infinity, as in `ntp_kernels.reference.gemm`."""
MIN_EXPONENT = -126
"""Exponent of a zero row or column, and lower bound of all."""


def segment_units(unit_rows: int) -> int:
    """Whole units in one segment."""
    return max(1, SEGMENT // unit_rows)


class RowScale(NamedTuple):
    """Scale of the rows of `a`: bound f32 [M], and the part of it that is room for drift.

    allowance f32 [M]: a chain may stray from its start by `allowance` times a segment's bound where a segment ends.
    A sum of K products drifts like a random walk, by DRIFT |a_i| |b_j| / sqrt(K); in units of the largest segment
    that is at most DRIFT |a_i| / (max_s |a_is| sqrt(L)), L the length of a segment: 0.3 for a Gaussian row of 14336,
    0.1 where one segment holds an outlier, 0 for a single segment.
    """

    bound: torch.Tensor
    allowance: torch.Tensor


def row_norms(a: torch.Tensor) -> torch.Tensor:
    """Return f32 [U, M]: the norm of every row of a [M, U, R] over every unit, NaN where it holds a NaN or infinity.

    Order: one tree over R per unit.
    """
    m, units, width = a.shape
    norms = a.new_empty(units, m, dtype=torch.float32)
    padded = triton.next_power_of_2(width)
    rows = max(1, 8192 // padded)
    _row_norms_kernel[(triton.cdiv(m, rows), units)](
        a, norms, m, units, WIDTH=width, PADDED=padded, ROWS=rows
    )
    return norms


def column_norms(w: torch.Tensor) -> torch.Tensor:
    """Return f32 [U, D]: the norm of every column of every unit of w [U, R, D], NaN as in `row_norms`.

    Order: rows of a unit in 64 interleaved sums, then a tree.
    """
    units, height, d = w.shape
    norms = w.new_empty(units, d, dtype=torch.float32)
    _column_norms_kernel[(triton.cdiv(d, 64), units)](w, norms, d, HEIGHT=height, ROWS=64, COLUMNS=64)
    return norms


def row_scale(norms: torch.Tensor, unit_rows: int) -> RowScale:
    """Return the scale of the rows from their norms f32 [total units, M] over all units.

    A row's bound times a column's bounds every partial sum inside a segment, and leaves the allowance.
    """
    bound, allowance = norms.new_empty(norms.shape[1]), norms.new_empty(norms.shape[1])
    _scale(norms, unit_rows, bound, allowance)
    return RowScale(bound, allowance)


def column_scale(norms: torch.Tensor, unit_rows: int) -> torch.Tensor:
    """Return the scale f32 [D] of the columns from their norms f32 [total units, D] over all units."""
    bound = norms.new_empty(norms.shape[1])
    _scale(norms, unit_rows, bound, None)
    return bound


def _scale(norms: torch.Tensor, unit_rows: int, bound: torch.Tensor, allowance: torch.Tensor | None) -> None:
    total_units, x = norms.shape
    per_segment = segment_units(unit_rows)
    drift = DRIFT / (per_segment * unit_rows) ** 0.5 if total_units > per_segment else 0.0
    padded = triton.next_power_of_2(per_segment)
    columns = max(16, 2048 // padded)
    _scale_kernel[(triton.cdiv(x, columns),)](
        norms, bound, bound if allowance is None else allowance, x, total_units, SLACK, drift,
        PER_SEGMENT=per_segment, PADDED=padded, COLUMNS=columns, DRIFTS=allowance is not None,
    )  # fmt: skip


def row_exponent(a: torch.Tensor) -> torch.Tensor:
    """Return i32 [M] for MAX over ranks: 2^e exceeds the scale that any cut of the units of a [M, U, R] gives."""
    return _exponent(row_norms(a), a.shape[2])


def column_exponent(w: torch.Tensor) -> torch.Tensor:
    """Return i32 [D] for MAX over ranks: 2^e exceeds the scale that any cut of the units of w [U, R, D] gives."""
    return _exponent(column_norms(w), w.shape[1])


def as_rows(value: RowScale | torch.Tensor) -> RowScale:
    """Return a row scale, or that of int32 exponents, whose factor leaves an allowance of 1."""
    if isinstance(value, RowScale):
        return value
    bound = as_columns(value)
    return RowScale(bound, torch.ones_like(bound))


def as_columns(value: torch.Tensor) -> torch.Tensor:
    """Return the f32 scale of either a scale or an int32 exponent: 2^e, NaN for POISON, 0 for a zero row."""
    if value.dtype == torch.float32:
        return value
    bits = (value.clamp(MIN_EXPONENT, 128) + 127) << 23
    scale = bits.view(torch.float32).masked_fill(value == POISON, torch.nan)
    return scale.masked_fill_(value == MIN_EXPONENT, 0.0)


def finish(
    total: torch.Tensor,
    row_scale: RowScale | torch.Tensor,
    column_scale: torch.Tensor,
    total_units: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [M, D] in `dtype` of the sum over ranks of `cut_matmul`: total i32 [M, D] times the grid's unit.

    `total_units` is not needed: the scales carry it. It is here for the twin in `ntp_kernels.reference`.
    """
    del total_units
    m, d = total.shape
    out = torch.empty_like(total, dtype=dtype)
    grid = (triton.cdiv(m, 4), triton.cdiv(d, 1024))
    rows, columns = as_rows(row_scale).bound, as_columns(column_scale)
    _finish_kernel[grid](total, rows, columns, out, m, d, ROWS=4, COLUMNS=1024)
    return out


def _exponent(norms: torch.Tensor, unit_rows: int) -> torch.Tensor:
    """The smallest e with factor * norm < 2^e over all units; the factor covers a segment and an allowance of 1."""
    factor = SLACK * (2 * segment_units(unit_rows)) ** 0.5
    largest = torch.amax(norms, 0)  # keeps NaN
    exponent = torch.frexp(largest * factor).exponent.to(torch.int32).clamp_(min=MIN_EXPONENT + 1)
    exponent = exponent.masked_fill_(largest == 0, MIN_EXPONENT)
    return exponent.masked_fill_(~torch.isfinite(largest), POISON)


@triton.jit
def _scaled_norm(square_sum, field):
    """sqrt(square_sum) * 2^(field - 127), where field is the exponent of the largest element."""
    return tl.sqrt_rn(square_sum) * (field << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(field):
    """2^(127 - field): takes the largest element to [1, 2)."""
    return ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _field(largest_bits):
    """Exponent field of bf16 bits without sign, inside what `_inverse` can invert."""
    return tl.minimum(tl.maximum(largest_bits >> 7, 1), 253)


@triton.jit(do_not_specialize=["M", "units"])
def _row_norms_kernel(
    a_ptr, norms_ptr, M, units, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(1)
    columns = tl.arange(0, PADDED)
    inside = (rows[:, None] < M) & (columns[None, :] < WIDTH)
    offsets = (rows[:, None].to(tl.int64) * units + unit) * WIDTH + columns[None, :]
    a = tl.load(a_ptr + offsets, mask=inside, other=0.0)
    largest = tl.max(a.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, 1)
    field = _field(largest)
    scaled = a.to(tl.float32) * _inverse(field)[:, None]
    norm = _scaled_norm(tl.sum(scaled * scaled, 1), field)
    norm = tl.where(largest >= 0x7F80, float("nan"), norm)
    tl.store(norms_ptr + unit.to(tl.int64) * M + rows, norm, mask=rows < M)


@triton.jit(do_not_specialize=["D"])
def _column_norms_kernel(
    w_ptr, norms_ptr, D, HEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    unit = tl.program_id(1)
    base = w_ptr + unit.to(tl.int64) * HEIGHT * D + columns[None, :]
    bits = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, HEIGHT, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        w = tl.load(base + rows.to(tl.int64) * D, mask=(rows < HEIGHT) & (columns[None, :] < D), other=0.0)
        bits = tl.maximum(bits, w.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF)
    largest = tl.max(bits, 0)
    field = _field(largest)
    inverse = _inverse(field)[None, :]
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, HEIGHT, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        w = tl.load(base + rows.to(tl.int64) * D, mask=(rows < HEIGHT) & (columns[None, :] < D), other=0.0)
        scaled = w.to(tl.float32) * inverse
        squares += scaled * scaled
    norm = tl.where(largest >= 0x7F80, float("nan"), _scaled_norm(tl.sum(squares, 0), field))
    tl.store(norms_ptr + unit.to(tl.int64) * D + columns, norm, mask=columns < D)


@triton.jit
def _segment(norms_ptr, first, columns, X, total_units, PER_SEGMENT: tl.constexpr, PADDED: tl.constexpr):
    """Norms of one segment [PADDED, COLUMNS] -> its norm [COLUMNS] and whether one of them is NaN."""
    members = tl.arange(0, PADDED)[:, None]
    inside = (members < PER_SEGMENT) & (first + members < total_units) & (columns[None, :] < X)
    offsets = (first + members).to(tl.int64) * X + columns[None, :]
    norms = tl.load(norms_ptr + offsets, mask=inside, other=0.0)
    field = tl.minimum(tl.maximum(tl.max(norms.to(tl.int32, bitcast=True), 0) >> 23, 1), 253)
    scaled = norms * _inverse(field)[None, :]
    return _scaled_norm(tl.sum(scaled * scaled, 0), field), tl.max((norms != norms).to(tl.int32), 0)


@triton.jit(do_not_specialize=["X", "total_units", "slack", "drift"])
def _scale_kernel(
    norms_ptr, bound_ptr, allowance_ptr, X, total_units, slack, drift,
    PER_SEGMENT: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, DRIFTS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.zeros((COLUMNS,), tl.float32)
    poison = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, total_units, PER_SEGMENT):
        norm, bad = _segment(norms_ptr, first, columns, X, total_units, PER_SEGMENT, PADDED)
        largest = tl.maximum(largest, norm)
        poison = tl.maximum(poison, bad)
    bound = largest * slack
    if DRIFTS:
        field = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        squares = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, total_units, PER_SEGMENT):
            norm, _ = _segment(norms_ptr, first, columns, X, total_units, PER_SEGMENT, PADDED)
            share = norm * _inverse(field)
            squares += share * share
        allowance = tl.div_rn(tl.sqrt_rn(squares), tl.maximum(largest * _inverse(field), 1e-30)) * drift
        allowance = tl.minimum(allowance, 1.0)
        allowance = tl.where(allowance == allowance, allowance, 1.0)
        tl.store(allowance_ptr + columns, allowance, mask=columns < X)
        bound *= 1.0 + allowance
    tl.store(bound_ptr + columns, tl.where(poison > 0, float("nan"), bound), mask=columns < X)


@triton.jit(do_not_specialize=["M"])
def _finish_kernel(total_ptr, row_ptr, column_ptr, out_ptr, M, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total * 2^(E - 23), E = floor(log2(row * column)) + 2; zero, infinity and NaN as the scales say."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < D)
    offsets = rows[:, None].to(tl.int64) * D + columns[None, :]
    row = tl.load(row_ptr + rows, mask=rows < M, other=0.0)[:, None]
    column = tl.load(column_ptr + columns, mask=columns < D, other=0.0)[None, :]
    total = tl.load(total_ptr + offsets, mask=inside, other=0).to(tl.float32)
    bound = row * column
    field = bound.to(tl.int32, bitcast=True) >> 23
    unit = ((tl.minimum(field, 252) + 2) << 23).to(tl.float32, bitcast=True)
    value = (total * 1.1920928955078125e-07) * unit
    value = tl.where(field >= 252, float("inf"), value)
    value = tl.where((row == 0.0) | (column == 0.0), 0.0, value)
    value = tl.where((row != row) | (column != column), float("nan"), value)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)
