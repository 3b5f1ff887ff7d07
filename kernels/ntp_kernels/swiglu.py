"""SwiGLU on the packed gate/up activations of local FFN units, forward and backward.

Legend: M tokens, U local units, B unit width. Elementwise in fp32, one rounding to the dtype of the input: no
reduction, so no bit depends on M, on U, or on which units are in the call. Zero columns of a padded unit stay
zero. The sigmoid is `1 / (1 + exp(-gate))`; the backward recomputes it from `gate_up`, nothing else is saved.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

_TILE = 4096


def swiglu(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up` [M, U, B] of `gate_up` [M, U, 2, B] (gate first), in `out` if given."""
    tokens, units, pair, width = gate_up.shape
    assert pair == 2
    assert gate_up.is_contiguous()
    y = gate_up.new_empty(tokens, units, width) if out is None else out
    rows, columns, grid = _tiles(tokens * units, width)
    _forward_kernel[grid](gate_up, y, tokens * units, B=width, ROWS=rows, COLUMNS=columns, num_warps=4)
    return y


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient [M, U, 2, B] of `gate_up` for `dy` [M, U, B]."""
    tokens, units, pair, width = gate_up.shape
    assert pair == 2
    assert gate_up.is_contiguous()
    assert dy.is_contiguous()
    assert dy.shape == (tokens, units, width)
    out = torch.empty_like(gate_up)
    rows, columns, grid = _tiles(tokens * units, width)
    _backward_kernel[grid](dy, gate_up, out, tokens * units, B=width, ROWS=rows, COLUMNS=columns, num_warps=4)
    return out


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    gate_up = pattern((40, 3, 2, 48), device, 31) * 8
    y = swiglu(gate_up)
    yield from (y, swiglu_backward(y, gate_up))


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


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(gate_up_ptr, y_ptr, count, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _tile(count, B, ROWS, COLUMNS)
    source = gate_up_ptr + row * (2 * B) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + B, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * B + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(
    dy_ptr, gate_up_ptr, out_ptr, count, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _tile(count, B, ROWS, COLUMNS)
    offsets = row * (2 * B) + column
    gate = tl.load(gate_up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + offsets + B, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * B + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(out_ptr + offsets, dgate.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + offsets + B, (dy * silu).to(out_ptr.dtype.element_ty), mask=inside)
