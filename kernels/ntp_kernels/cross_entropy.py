"""Vocabulary-parallel cross entropy: local passes only, between which the caller combines ranks.

Legend: M tokens, U local vocabulary units of V columns; column c of unit u is token id `(first_unit + u) * V
+ c`, padded from `vocab_size` on. The logits are the bf16 output [M, U, V] of the head GEMM: they are read
once for the statistics and once, with one write, for the gradient. fp32 copies of logits exist only in
registers.

1. `ce_statistics` reads the logits: largest logit per row, and per row and unit the unit's own largest logit
   and `sum exp(logit - largest)`. The caller combines the row maxima over ranks by MAX (exact).
2. `ce_sums` scales every unit's sum to the row maximum, rounds it to the grid 2^-40 and adds units as int64,
   so that units add up to the same integer under any cut. The caller adds ranks as integers and forms
   `lse = row_max + log(sum * 2^-40)`; the loss is `lse - target logit`.
3. `ce_backward` is elementwise.

A unit's statistics are one program's work in one order set by V, so they depend on that unit of that row
alone. A NaN or +Inf among a row's logits makes its row maximum +Inf and its sums 0: the row's lse is NaN for
every rank.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

GRID_BITS = 40
"""Sums of exponentials are integers in units of 2^-GRID_BITS; 2^17 columns of at most 1 stay below 2^58."""

IGNORED = -100
"""Target of a token without a loss."""

_CHUNK = 4096
_ROWS = 16


def ce_statistics(
    logits: torch.Tensor, first_unit: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit f32 [M] of the shard's real columns, and f32 [M, U, 2] for `ce_sums`.

    The row maximum is +Inf for a row with NaN and -Inf without a real column.

    Order of a unit's sum: chunks of at most 4096 columns left to right; lane j of a chunk is added to lane j
    of the running sums (rescaled when the maximum grows), then one fixed tree over the lanes.
    """
    tokens, units, width = logits.shape
    assert logits.is_contiguous()
    row_max = logits.new_empty(tokens, dtype=torch.float32)
    statistics = logits.new_empty(tokens, units, 2, dtype=torch.float32)
    chunk = min(triton.next_power_of_2(width), _CHUNK)
    _statistics_kernel[(tokens,)](
        logits, row_max, statistics, units, vocab_size - first_unit * width,
        V=width, CHUNK=chunk, num_warps=max(1, chunk // 1024),
    )  # fmt: skip
    return row_max, statistics


def ce_sums(
    logits: torch.Tensor,
    row_max: torch.Tensor,
    targets: torch.Tensor,
    first_unit: int,
    vocab_size: int,
    statistics: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `sum exp(logit - row_max)` i64 [M] in units of 2^-40 and the target logit's f32 bits i32 [M].

    `row_max` f32 [M] is the maximum over all ranks, `targets` i64 [M] are token ids or -100. The bits are 0
    where the target is not in this shard. Each unit's f32 sum is multiplied by `exp(unit maximum - row_max)`,
    rounded half up to the grid, and added as int64; the logits are read at the target only.
    """
    tokens, units, width = logits.shape
    sums = logits.new_empty(tokens, dtype=torch.int64)
    bits = logits.new_empty(tokens, dtype=torch.int32)
    _sums_kernel[(triton.cdiv(tokens, _ROWS),)](
        logits, statistics, row_max, targets, sums, bits, tokens, units, first_unit * width, vocab_size,
        V=width, UNITS=triton.next_power_of_2(units), GRID=float(2**GRID_BITS), ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return sums, bits


def ce_backward(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    first_unit: int,
    vocab_size: int,
    out: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient [M, U, V] of the sum of token losses: `exp(logit - lse) - onehot(target)`.

    `lse` f32 [M] over the whole vocabulary. Padded columns and rows whose target is -100 are exactly 0.
    `out` may be `logits` itself; `weights` f32 [M] are of the losses in their sum, 1 by default. Elementwise
    in fp32, one rounding.
    """
    tokens, units, width = logits.shape
    assert logits.is_contiguous()
    out = torch.empty_like(logits) if out is None else out
    assert out.shape == logits.shape
    assert out.is_contiguous()
    chunk = min(triton.next_power_of_2(width), _CHUNK)
    _backward_kernel[(tokens, units * triton.cdiv(width, chunk))](
        logits, lse, targets, lse if weights is None else weights, out, units, first_unit * width, vocab_size,
        V=width, CHUNK=chunk, SKIP=IGNORED, WEIGHTED=weights is not None, num_warps=max(1, chunk // 1024),
    )  # fmt: skip
    return out


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    logits = pattern((20, 3, 64), device, 51) * 16
    targets = torch.arange(20, device=device) * 9 % 170
    row_max, statistics = ce_statistics(logits, 1, 230)
    sums, bits = ce_sums(logits, row_max, targets, 1, 230, statistics)
    yield from (row_max, statistics, sums, bits, ce_backward(logits, row_max + 1, targets, 1, 230))


@triton.jit(do_not_specialize=["units", "limit"])
def _statistics_kernel(
    logits_ptr, row_max_ptr, statistics_ptr, units, limit, V: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    row_max = float("-inf")
    for unit in range(units):
        base = logits_ptr + (row * units + unit) * V
        top = float("-inf")
        sums = tl.zeros([CHUNK], tl.float32)
        for first in range(0, V, CHUNK):
            column = first + lane
            # Only the mask by V, a multiple of 16, keeps the loads 16 bytes wide.
            x = tl.load(base + column, mask=column < V, other=float("-inf")).to(tl.float32)
            x = tl.where(unit * V + column < limit, tl.where(x == x, x, float("inf")), float("-inf"))
            new_top = tl.maximum(top, tl.max(x, axis=0))
            # Without a real column so far the maximum is -Inf: subtract 0, the exponentials are 0 anyway.
            origin = tl.where(new_top == float("-inf"), 0.0, new_top)
            sums = sums * tl.exp(top - origin) + tl.exp(x - origin)
            top = new_top
        target = statistics_ptr + (row * units + unit) * 2
        tl.store(target, top)
        tl.store(target + 1, tl.sum(sums, axis=0))
        row_max = tl.maximum(row_max, top)
    tl.store(row_max_ptr + row, row_max)


@triton.jit(do_not_specialize=["tokens", "units", "first_column", "vocab_size"])
def _sums_kernel(
    logits_ptr, statistics_ptr, row_max_ptr, targets_ptr, sums_ptr, bits_ptr, tokens, units, first_column,
    vocab_size, V: tl.constexpr, UNITS: tl.constexpr, GRID: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tokens
    unit = tl.arange(0, UNITS)
    statistics = statistics_ptr + (row[:, None] * units + unit[None, :]) * 2
    inside = live[:, None] & (unit < units)[None, :]
    top = tl.load(statistics, mask=inside, other=float("-inf"))
    part = tl.load(statistics + 1, mask=inside, other=0.0)
    below = tl.load(row_max_ptr + row, mask=live, other=0.0)[:, None] - top
    usable = below < float("inf")  # false for an empty unit, a poisoned row and a poisoned unit (NaN)
    scaled = tl.where(usable, part * tl.exp(tl.where(usable, -below, 0.0)), 0.0)
    whole = tl.floor(scaled.to(tl.float64) * GRID + 0.5).to(tl.int64)
    tl.store(sums_ptr + row, tl.sum(whole, axis=1), mask=live)
    name = tl.load(targets_ptr + row, mask=live, other=-1)
    column = name - first_column
    owned = (column >= 0) & (column < units * V) & (name < vocab_size)
    logit = tl.load(logits_ptr + row * units * V + column, mask=owned, other=0.0).to(tl.float32)
    tl.store(bits_ptr + row, tl.where(owned, logit.to(tl.int32, bitcast=True), 0), mask=live)


@triton.jit(do_not_specialize=["units", "first_column", "vocab_size"])
def _backward_kernel(
    logits_ptr, lse_ptr, targets_ptr, weights_ptr, out_ptr, units, first_column, vocab_size,
    V: tl.constexpr, CHUNK: tl.constexpr, SKIP: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks: tl.constexpr = (V + CHUNK - 1) // CHUNK
    unit = tl.program_id(1) // chunks
    column = tl.program_id(1) % chunks * CHUNK + tl.arange(0, CHUNK)
    inside = column < V
    offsets = (row * units + unit) * V + column
    x = tl.load(logits_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    name = first_column + unit * V + column
    target = tl.load(targets_ptr + row)
    gradient = tl.exp(x - tl.load(lse_ptr + row)) - tl.where(name == target, 1.0, 0.0)
    if WEIGHTED:
        gradient *= tl.load(weights_ptr + row)
    gradient = tl.where((name < vocab_size) & (target != SKIP), gradient, 0.0)
    tl.store(out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), mask=inside)
