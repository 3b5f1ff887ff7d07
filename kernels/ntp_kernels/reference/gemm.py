"""The three GEMMs of the trainer, and order-free sums for the contraction that tensor parallelism cuts.

`linear` and `linear_wgrad` contract over a dimension that is whole on the rank. `cut_matmul` contracts over
rows of units that are spread over ranks; floating-point addition across ranks would depend on the cut,
integers do not:

1. Every unit u has norms |a_iu| (row i) and |w_uj| (column j). 2^r_i and 2^c_j bound `SLACK` times the
   largest of them over ALL units (the caller takes the MAX of local exponents over ranks).
2. Both operands are scaled by these powers of two, which is exact, so that by Cauchy-Schwarz the unit's
   product P_u lies inside (-1, 1), and so does every partial sum of it. Nothing overflows or underflows.
3. P_u is a float32 GEMM of one fixed shape, rounded half to even to the grid 2^-bits and added as int32.
   The sum over `total_units` stays below 2^31: see `grid_bits`.
4. `finish` takes the int32 sum over ranks back to floating point.

Relative error about 3e-7 times a few (float32 leaf products and the grid). A NaN or an infinity cannot
travel in an integer, so it travels in the exponents: `POISON` turns the row (or column) into NaN in `finish`.
"""

import torch

from .units import unit_blocks

POISON = 1 << 20
"""Exponent of a row or column that holds a NaN or an infinity; larger than any other, so MAX keeps it."""

MIN_EXPONENT = -126
"""Exponent of a zero row, and lower bound of all: float32 has no normal numbers below."""

SLACK = 1.001
"""Covers the rounding of the norms and of the float32 product, or |P_u| could reach 1."""


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return y [M, U, R] = x [M, D] times w [U, R, D] transposed, plus bias [U, R]: one GEMM per unit.

    `out` receives the result.
    """
    if not w.shape[0]:
        return x.new_empty(x.shape[0], 0, w.shape[1])
    x32 = x.float()
    blocks = [torch.mm(x32, unit.t()) for unit in w.float()]
    if bias is not None:
        blocks = [block.add_(row) for block, row in zip(blocks, bias.float(), strict=True)]
    y = torch.stack(blocks, 1).to(x.dtype)
    return y if out is None else out.copy_(y)


def linear_wgrad(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Add dy [M, U, R] transposed times x [M, D] to out f32 [U, R, D]: a GEMM per unit, then an addition."""
    x32 = x.float()
    for block, target in zip(unit_blocks(dy), out, strict=True):
        target.add_(torch.mm(block.t(), x32))


def bias_grad(dy: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum over tokens of dy [M, U, R] to out f32 [U, R]: one sum per unit, then one addition."""
    for block, target in zip(unit_blocks(dy), out, strict=True):
        target.add_(block.sum(0))


def row_norms(a: torch.Tensor) -> torch.Tensor:
    """Return f64 [U, M]: the norm of every row in every unit of a [M, U, R]."""
    norms = a.new_empty(a.shape[1], a.shape[0], dtype=torch.float64)
    for block, row in zip(unit_blocks(a), norms, strict=True):
        row.copy_(block.double().square_().sum(1).sqrt_())
    return norms


def row_scale(norms: torch.Tensor, unit_rows: int) -> torch.Tensor:
    """Return i32 [M]: the smallest e with SLACK * norm < 2^e for the norms f64 [total units, M] of a row.

    `unit_rows` is not needed: leaves are units.
    """
    del unit_rows
    return _exponent(norms)


def column_scale(w: torch.Tensor) -> torch.Tensor:
    """Return i32 [D]: the smallest e with SLACK * |w_uj| < 2^e for every unit u of w [U, R, D]."""
    sums = [unit.double().square_().sum(0) for unit in w]
    return _exponent(torch.stack(sums).sqrt_() if sums else w.new_zeros(0, w.shape[2], dtype=torch.float64))


def grid_bits(total_units: int) -> int:
    """Return the grid's bits: a unit's |P_u| < 0.999 takes less than 2^bits, their sum less than 2^31."""
    return 31 - (total_units - 1).bit_length()


def cut_matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    row_exponent: torch.Tensor,
    column_exponent: torch.Tensor,
    total_units: int,
    first_unit: int = 0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return i32 [M, D]: the local units' share of a [M, U, R] times w [U, R, D] on the common grid.

    `first_unit` (the global id of the first local unit) is not needed here: leaves are units. Rows and
    columns whose exponent is POISON hold no meaning. `out` receives the result.
    """
    scaled_a = a.float() * _power_of_two(-row_exponent).float()[:, None, None]
    scaled_w = w.float() * _power_of_two(-column_exponent).float()
    if out is None:
        out = torch.empty(a.shape[0], w.shape[2], dtype=torch.int32, device=a.device)
    total = out.zero_()
    for block, unit in zip(unit_blocks(scaled_a), scaled_w, strict=True):
        product = torch.mm(block, unit)
        total += product.mul_(2.0 ** grid_bits(total_units)).round_().to(torch.int32)
    return total


def finish(
    total: torch.Tensor,
    row_exponent: torch.Tensor,
    column_exponent: torch.Tensor,
    total_units: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [M, D] of the sum over ranks of `cut_matmul`: exact in float64, then rounded to `dtype`.

    A total [P, M, D] is summed over P first; `out` receives the result.
    """
    if total.dim() == 3:
        total = total.sum(0, dtype=torch.int32)
    row_scale = _power_of_two(row_exponent).masked_fill_(row_exponent == POISON, torch.nan)
    column_scale = _power_of_two(column_exponent).masked_fill_(column_exponent == POISON, torch.nan)
    column_scale.mul_(2.0 ** -grid_bits(total_units))
    value = total.double().mul_(row_scale.unsqueeze(1)).mul_(column_scale).to(dtype)
    return value if out is None else out.copy_(value)


def _exponent(norms: torch.Tensor) -> torch.Tensor:
    """Return the exponents i32 [X] of the units' norms f64 [U, X]."""
    largest = torch.cat([norms.new_zeros(1, norms.shape[1]), norms]).amax(0)  # keeps NaN
    norms = largest.mul_(SLACK).clamp_(min=2.0 ** (MIN_EXPONENT - 1))
    exponent = torch.frexp(norms).exponent  # of zero it would be 0, hence the clamp
    return exponent.masked_fill_(~torch.isfinite(norms), POISON)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent as float64: exact, 0 for -POISON and infinite for POISON."""
    return exponent.double().exp2_()
