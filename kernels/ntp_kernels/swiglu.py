"""SwiGLU on the packed gate/up activations of local FFN units, forward and backward.

Legend: M tokens, U local units, B unit width. Elementwise in fp32, one rounding to the dtype of the input: no
reduction, so no bit depends on M, on U, or on which units are in the call. Zero columns of a padded unit stay
zero. The sigmoid is `1 / (1 + exp(-gate))`; the backward recomputes it from `gate_up`, nothing else is saved.

What comes out goes into a cut product, which needs the norms of its rows (`cut_scale.row_norms`): they are
taken on the way, where that moves no bit.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .cut_scale import largest_bits, row_norms, scaled_back, scaled_block_norms

_TILE = 4096
_BLOCK = 32
"""Of a row's norms."""

_WIDTHS_WITH_NORMS = (32, 64, 128)
"""Those for which both add in the same order (an H200; at 1024 they do not)."""


def swiglu(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up` [M, U, B] of `gate_up` [M, U, 2, B] (gate first), in `out` if given."""
    return _forward(gate_up, out, None)


def swiglu_with_norms(
    gate_up: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `swiglu` returns, and its `row_norms` f32 [U, M]."""
    tokens, units = gate_up.shape[:2]
    if not _takes_norms(gate_up):
        y = swiglu(gate_up, out)
        return y, row_norms(y)
    norms = gate_up.new_empty(units, tokens, dtype=torch.float32)
    return _forward(gate_up, out, norms), norms


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient [M, U, 2, B] of `gate_up` for `dy` [M, U, B]."""
    return _backward(dy, gate_up, None)


def swiglu_backward_with_norms(dy: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `swiglu_backward` returns, and its `row_norms` f32 [U, M], a unit having 2 B columns."""
    tokens, units = gate_up.shape[:2]
    if not _takes_norms(gate_up):
        dgate_up = swiglu_backward(dy, gate_up)
        return dgate_up, row_norms(dgate_up.flatten(2))
    norms = gate_up.new_empty(units, tokens, dtype=torch.float32)
    return _backward(dy, gate_up, norms), norms


def _forward(gate_up: torch.Tensor, out: torch.Tensor | None, norms: torch.Tensor | None) -> torch.Tensor:
    tokens, units, pair, width = gate_up.shape
    assert pair == 2
    assert gate_up.is_contiguous()
    y = gate_up.new_empty(tokens, units, width) if out is None else out
    rows, columns, grid = _tiles(tokens * units, width)
    _forward_kernel[grid](
        gate_up, y, norms, tokens, units, B=width, ROWS=rows, COLUMNS=columns, BLOCK=_BLOCK,
        NORMS=norms is not None, num_warps=4,
    )  # fmt: skip
    return y


def _backward(dy: torch.Tensor, gate_up: torch.Tensor, norms: torch.Tensor | None) -> torch.Tensor:
    tokens, units, pair, width = gate_up.shape
    assert pair == 2
    assert gate_up.is_contiguous()
    assert dy.is_contiguous()
    assert dy.shape == (tokens, units, width)
    out = torch.empty_like(gate_up)
    rows, columns, grid = _tiles(tokens * units, width)
    _backward_kernel[grid](
        dy, gate_up, out, norms, tokens, units, B=width, ROWS=rows, COLUMNS=columns, BLOCK=_BLOCK,
        NORMS=norms is not None, num_warps=4,
    )  # fmt: skip
    return out


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    for width in (48, 64):  # without norms and with them
        gate_up = pattern((40, 3, 2, width), device, 31) * 8
        y, norms = swiglu_with_norms(gate_up)
        yield from (y, norms, *swiglu_backward_with_norms(y, gate_up))


def _takes_norms(gate_up: torch.Tensor) -> bool:
    """Whether a row of a unit is spread over threads as in `row_norms`, which thus adds in the same order."""
    width = gate_up.shape[3]
    return gate_up.dtype == torch.bfloat16 and width in _WIDTHS_WITH_NORMS


def _tiles(rows: int, width: int) -> tuple[int, int, tuple[int, int]]:
    """Return rows and columns of one program's tile and the grid for [rows, width]."""
    columns = min(triton.next_power_of_2(width), _TILE // 4)
    tile_rows = _TILE // columns
    return tile_rows, columns, (triton.cdiv(rows, tile_rows), triton.cdiv(width, columns))


@triton.jit
def _tile(count, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < count) & (column < B)


@triton.jit
def _store_norms(norms_ptr, norm, tokens, units, ROWS: tl.constexpr):
    """Norms of rows that count units first go to [U, M]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(norms_ptr + row % units * tokens + row // units, norm, mask=row < tokens * units)


@triton.jit(do_not_specialize=["tokens", "units"])
def _forward_kernel(
    gate_up_ptr, y_ptr, norms_ptr, tokens, units,
    B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _tile(tokens * units, B, ROWS, COLUMNS)
    source = gate_up_ptr + row * (2 * B) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + B, mask=inside, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * B + column, y, mask=inside)
    if NORMS:
        largest = largest_bits(y)
        norm = tl.sum(scaled_block_norms(y, largest, ROWS, COLUMNS, BLOCK), 1)
        _store_norms(norms_ptr, scaled_back(norm, largest), tokens, units, ROWS)


@triton.jit(do_not_specialize=["tokens", "units"])
def _backward_kernel(
    dy_ptr, gate_up_ptr, out_ptr, norms_ptr, tokens, units,
    B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _tile(tokens * units, B, ROWS, COLUMNS)
    offsets = row * (2 * B) + column
    gate = tl.load(gate_up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + offsets + B, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * B + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = (dy * up * (sigmoid + silu * (1.0 - sigmoid))).to(out_ptr.dtype.element_ty)
    dup = (dy * silu).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, dgate, mask=inside)
    tl.store(out_ptr + offsets + B, dup, mask=inside)
    if NORMS:
        largest = tl.maximum(largest_bits(dgate), largest_bits(dup))
        norms = scaled_block_norms(dgate, largest, ROWS, COLUMNS, BLOCK)
        norms += scaled_block_norms(dup, largest, ROWS, COLUMNS, BLOCK)
        _store_norms(norms_ptr, scaled_back(tl.sum(norms, 1), largest), tokens, units, ROWS)
