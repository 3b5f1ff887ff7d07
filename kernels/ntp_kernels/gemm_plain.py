"""The GEMMs in plain Triton: persistent programs, TMA descriptors, Triton's own pipeliner.

They run wherever Triton has TMA descriptors, its CPU interpreter included, with every shape and epilogue, and
give the bits of `gemm_hopper_kernels.py`: each output element is one chain of k16 steps in ascending k.
Order: tile rows in groups, k ascending inside a tile; no atomics, no split of k.

In the interpreter a dot runs in float32 (its bf16 dot is wrong in Triton 3.7 to 3.9); products stay exact,
the order of the sum does not, so there only exactly representable sums are checked bit for bit.
"""
# Triton's signatures do not describe what a jitted function accepts.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .tuning import Tile

CHAIN, LEAF = 0, 1
NEVER = 1 << 30


class Pieces(NamedTuple):
    """A contraction in pieces: [0, first), then `length` each, `number` in all.

    Chains cross to the other side of zero after every `period` pieces of the whole contraction; `phase` is
    the index there of the first piece here, modulo twice the period.
    """

    first: int
    length: int
    number: int
    phase: int = 0
    period: int = NEVER


WHOLE = Pieces(0, 0, 1)
"""One piece: everything."""


@triton.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    size = min(tiles_m - first, GROUP)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def _dot(a, b, accumulator, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        accumulator = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    else:
        accumulator = tl.dot(a, b, accumulator)
    return accumulator


@triton.jit
def _store(desc, m, n, tile, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr):
    """Store or add a tile in SPLIT pieces of neighbouring columns, to need less shared memory at once."""
    if SPLIT == 1:
        if ADD:
            tile += desc.load([m, n])
        desc.store([m, n], tile)
    else:
        left, right = tile.reshape(tile.shape[0], 2, COLUMNS // 2).permute(0, 2, 1).split()
        _store(desc, m, n, left, COLUMNS // 2, SPLIT // 2, ADD)
        _store(desc, m, n + COLUMNS // 2, right, COLUMNS // 2, SPLIT // 2, ADD)


@triton.jit(do_not_specialize=["M", "N", "K"])
def _linear_kernel(
    a_desc, b_desc, c_desc, bias_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c [M, N] = a [M, K] b [N, K]^T + bias [N]."""
    tiles_m = tl.cdiv(M, ROWS)
    tiles_n = tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP)
        m = tile_m * ROWS
        n = tile_n * COLUMNS
        accumulator = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(0, K, DEPTH):
            accumulator = _dot(a_desc.load([m, k]), b_desc.load([n, k]).T, accumulator, INTERPRETED)
        if BIAS:
            columns = n + tl.arange(0, COLUMNS)
            accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        _store(c_desc, m, n, accumulator.to(DTYPE), COLUMNS, SPLIT, False)


@triton.jit(do_not_specialize=["M", "N", "K"])
def _wgrad_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c [M, N] += a [K, M]^T b [K, N]: one fp32 addition per element."""
    tiles_m = tl.cdiv(M, ROWS)
    tiles_n = tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP)
        m = tile_m * ROWS
        n = tile_n * COLUMNS
        accumulator = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(0, K, DEPTH):
            accumulator = _dot(a_desc.load([k, m]).T, b_desc.load([k, n]), accumulator, INTERPRETED)
        _store(c_desc, m, n, accumulator, COLUMNS, SPLIT, True)


@triton.jit
def _power(exponent_field):
    """2^(exponent_field - 127) as float32, for fields in [1, 254]."""
    return (exponent_field << 23).to(tl.float32, bitcast=True)


@triton.jit
def _cut_block(
    a_desc, b_desc, c_desc, row_ptr, column_ptr, m, n, M, N, K,
    first, length, pieces, phase, period, origin,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, FORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The integers of the block at (m, n), piece by piece of K: [0, first), then `length` each.

    FORM 0, chains: every piece starts at 1.5 * 2^E or, on the other side of zero, at -1.5 * 2^E. FORM 1,
    leaves: every piece is a plain fp32 sum, rounded to the same grid. A piece's start is computed, not
    carried: Triton 3.6 loses a carried lower bound of an inner loop.
    """
    rows = m + tl.arange(0, ROWS)
    columns = n + tl.arange(0, COLUMNS)
    row = tl.load(row_ptr + rows, mask=rows < M, other=0.0)
    column = tl.load(column_ptr + columns, mask=columns < N, other=0.0)
    field = (row[:, None] * column[None, :]).to(tl.int32, bitcast=True) & 0x7F800000
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for piece in range(pieces):
        begin = max(first + (piece - 1) * length, 0)
        end = min(first + piece * length, K)
        minus = ((phase + piece) // period) & 1
        if FORM == 0:
            accumulator = (field + ((minus << 31) + 0x01400000)).to(tl.float32, bitcast=True)
        else:
            accumulator = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in tl.range(begin, end, DEPTH):
            accumulator = _dot(a_desc.load([m, k]), b_desc.load([k, n]), accumulator, INTERPRETED)
        if FORM == 0:
            total += ((accumulator.to(tl.int32, bitcast=True) & 0x7FFFFF) - 0x400000) * (1 - 2 * minus)
        else:
            # 2^(23 - E) in two steps, since it may exceed what one float32 holds; E = field - 125.
            total += _nearest(accumulator * _power(252 - tl.minimum(field >> 23, 251)) * 8388608.0)
    _store(c_desc, m, n, total - origin, COLUMNS, SPLIT, False)


@triton.jit(do_not_specialize=["M", "N", "K", "first", "length", "pieces", "phase", "period", "origin"])
def _cut_kernel(
    a_desc, b_desc, c_desc, row_ptr, column_ptr, M, N, K, first, length, pieces, phase, period, origin,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    FORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c i32 [M, N] = integers of a [M, K] b [K, N]."""
    tiles_m = tl.cdiv(M, ROWS)
    tiles_n = tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP)
        _cut_block(
            a_desc, b_desc, c_desc, row_ptr, column_ptr, tile_m * ROWS, tile_n * COLUMNS, M, N, K,
            first, length, pieces, phase, period, origin, ROWS, COLUMNS, DEPTH, SPLIT, FORM, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _nearest(x):
    """Nearest integer, ties to even, of |x| <= 2^22: the addition rounds, the mantissa is read."""
    return ((x + 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFF) - 0x400000


def interpreted() -> bool:
    """Whether Triton runs its CPU interpreter in this process."""
    return not isinstance(_linear_kernel, triton.runtime.JITFunction)


def linear(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tile: Tile, bias: torch.Tensor | None = None
) -> None:
    """out [M, N] = a [M, K] b [N, K]^T + bias [N]."""
    (m, n), k = out.shape, a.shape[1]
    _linear_kernel[_grid(out, tile)](
        _descriptor(a, tile.rows, tile.depth), _descriptor(b, tile.columns, tile.depth),
        _descriptor(out, tile.rows, tile.columns // tile.split), out if bias is None else bias, m, n, k,
        tile.rows, tile.columns, tile.depth, tile.group, tile.split, tile.flatten, _TYPES[out.dtype],
        bias is not None, interpreted(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def wgrad(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    """out [M, N] += a [K, M]^T b [K, N]."""
    (m, n), k = out.shape, a.shape[0]
    _wgrad_kernel[_grid(out, tile)](
        _descriptor(a, tile.depth, tile.rows), _descriptor(b, tile.depth, tile.columns),
        _descriptor(out, tile.rows, tile.columns // tile.split), m, n, k,
        tile.rows, tile.columns, tile.depth, tile.group, tile.split, tile.flatten, interpreted(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def cut(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    form: int,
    scales: tuple[torch.Tensor, torch.Tensor],
    pieces: Pieces,
    origin: int = 0,
) -> None:
    """out i32 [M, N] = integers of a [M, K] b [K, N], less `origin`.

    The lengths of the pieces are multiples of `tile.depth`.
    """
    (m, n), k = out.shape, a.shape[1]
    _cut_kernel[_grid(out, tile)](
        _descriptor(a, tile.rows, tile.depth), _descriptor(b, tile.depth, tile.columns),
        _descriptor(out, tile.rows, tile.columns // tile.split), *scales, m, n, k, *pieces, origin,
        tile.rows, tile.columns, tile.depth, tile.group, tile.split, form, interpreted(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int32: tl.int32}


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _grid(out: torch.Tensor, tile: Tile) -> tuple[int]:
    tiles = triton.cdiv(out.shape[0], tile.rows) * triton.cdiv(out.shape[1], tile.columns)
    return (min(tiles, multiprocessors(out.device)),)


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Programs that run at once; a few in the interpreter, so that a program sees several tiles."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
