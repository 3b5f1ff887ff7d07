"""The contraction that sharding cuts, as integers: any cut, any order of summation, the same bits.

`cut_matmul` gives int32 partial sums of a [M, U, R] times w [U, R, D] on a grid that all ranks share; the
caller adds them over ranks with an integer SUM, `finish` turns the total into floats. Scales: `cut_scale.py`.

Biased chains. Element (i, j) of the tensor core's accumulator starts at 1.5 * 2^E, where the scales promise
that every partial sum inside a segment stays below 2^(E-1). The accumulator keeps its exponent, the
hardware's truncation becomes a floor to the grid 2^(E-23), and each k16 group adds an integer that depends on
nothing else. The mantissa is the exact sum of these integers, wherever the shard began. It rests on
undocumented behaviour (`integer_model.py`), which `selftest.py` proves at start-up; where it fails use form
`leaf`: fp32 sums per unit, rounded to the same grid.

Segments bound the error, not the chain. A short segment gives a fine grid; a chain that has run through
several segments still holds the exact integer as long as it has not strayed too far, so it is only looked at
where a segment ends. Restarting it at every segment, the obvious way, cost 18 % (H100, 8192x4096x14336,
2026-11-28: 605 TFLOP/s with integer adds against 686 with seven looks and 733 for cuBLAS fp32-out). Where a
chain has strayed, its integer is banked and it begins anew. Random operands never stray; those of a model in
training do, because rows and columns come to point the same way.

The floor loses 3/8 of a unit per group on average. A shard adds c(end) - c(begin), c(k) = floor(3 k / 128),
which telescopes to the same total for every cut.

Long contractions, a vocabulary, take gradients of logits: one large element, the target, and a tail. Where
the products of the tail lie below the grid nothing is lost to the floor, and correcting for it would shift
every token the same way: by 0.2 to 1 % of the result, several times the rounding to bf16. So there a chain
crosses zero after every fourth segment, from 1.5 * 2^E to -1.5 * 2^E and back (`crossing_period`). Truncation
is a floor on one side and a ceiling on the other, the two errors cancel whatever their size, and the integers
stay what they were: each group still adds a number of its own (`tests/kernels/test_integer_model.py`).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch

from . import gemm_plain
from .cut_scale import (
    RowScale,
    column_scale,
    crossing_period,
    finish,
    row_norms,
    row_scale,
    segment_units,
)
from .gemm_plain import Pieces
from .tuning import PLAIN, Tile, choose

__all__ = [
    "RowScale",
    "column_scale",
    "cut_matmul",
    "finish",
    "row_norms",
    "row_scale",
]

Form = Literal["chain", "leaf"]


def cut_matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    row: RowScale,
    column: torch.Tensor,
    total_units: int,
    first_unit: int = 0,
    *,
    form: Form = "chain",
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return i32 [M, D], to be combined over ranks by SUM: the local share of a [M, U, R] times w [U, R, D].

    bf16 operands, contiguous, R and D multiples of 16. row, column: from `row_scale` and `column_scale` over
    all `total_units` units; `first_unit`: global id of the first local one. Rows and columns whose scale is
    NaN or beyond float32 hold no meaning. `tile` overrides the tuned one; `out`, contiguous, receives the
    result.
    """
    m, units, rows = a.shape
    assert w.shape[:2] == (units, rows)
    assert rows % 16 == w.shape[2] % 16 == 0
    assert first_unit + units <= total_units
    scales = (row.bound, column)
    out = a.new_empty(m, w.shape[2], dtype=torch.int32) if out is None else out
    flat_a, flat_w = a.view(m, units * rows), w.view(units * rows, w.shape[2])
    if form == "leaf":
        plain = replace(PLAIN, depth=_depth(rows))
        gemm_plain.cut(flat_a, flat_w, out, plain, gemm_plain.LEAF, scales, Pieces(rows, rows, units))
        return out
    per_segment, period = segment_units(total_units, rows), crossing_period(total_units, rows)
    pieces = _pieces(units, rows, first_unit, per_segment, period)
    block = period * per_segment * rows
    origin = _correction(first_unit * rows, block) - _correction((first_unit + units) * rows, block)
    tile = tile or _tile(out, units * rows)
    depth = _depth(pieces.first, pieces.length)
    if tile.kernel == "plain" or (pieces.number > 1 and depth % tile.depth != 0):
        plain = replace(PLAIN, depth=depth)
        gemm_plain.cut(flat_a, flat_w, out, plain, gemm_plain.CHAIN, scales, pieces, origin)
    else:
        from . import gemm_hopper  # imports Gluon, which only the card it is for needs

        gemm_hopper.multiply(
            flat_a, flat_w, out, tile, "chain", a_transposed=False, b_transposed=False, scales=scales,
            pieces=pieces, origin=origin, window=row.window,
        )  # fmt: skip
    return out


def _pieces(units: int, rows: int, first_unit: int, per_segment: int, period: int) -> Pieces:
    """The segments that `units` from `first_unit` touch."""
    first = min(units, per_segment - first_unit % per_segment)
    count = 1 + -(-(units - first) // per_segment)
    return Pieces(first * rows, per_segment * rows, count, first_unit // per_segment % (2 * period), period)


def _depth(*lengths: int) -> int:
    """The deepest step that divides all lengths."""
    return next(depth for depth in (64, 32, 16) if all(length % depth == 0 for length in lengths))


@lru_cache(maxsize=4096)
def _correction(k: int, block: int) -> int:
    """What the first k products of a row have lost on average: 3/8 per group, gained in every other block."""
    lost = 0
    for number, begin in enumerate(range(0, k, block)):
        part = 3 * min(begin + block, k) // 128 - 3 * begin // 128
        lost += -part if number % 2 else part
    return lost


def _tile(out: torch.Tensor, k: int) -> Tile:
    if out.device.type == "cpu" or torch.cuda.get_device_capability(out.device) != (9, 0):
        return PLAIN
    return choose("cut", (out.shape[0], out.shape[1], k), torch.cuda.get_device_name(out.device))
