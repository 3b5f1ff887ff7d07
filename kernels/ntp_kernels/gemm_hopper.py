"""Launches of the Hopper GEMM: `gemm_hopper_kernels.py` compiled once per tile, for every shape."""

# Triton's signatures do not describe what a jitted function accepts.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportFunctionMemberAccess=false

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gemm_hopper_kernels import gemm_kernel
from .gemm_plain import WHOLE, Pieces, multiprocessors
from .tuning import Tile

_REGISTERS = {1: 168, 2: 168, 3: 128}
"""Per thread at launch: 12 warps of them fill the register file; the warpgroups then trade them."""
_CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = 24
_BUFFERS = 2
"""Output buffers of one consumer."""
_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int32: gl.int32}


@lru_cache(maxsize=256)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])


def _descriptor(matrix: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), list(block), _layout(block, matrix.dtype)
    )


def _constants(tile: Tile, a_t: bool, b_t: bool, epilogue: str, pieces: bool) -> tuple[object, ...]:
    """The constexpr arguments of `gemm_kernel`, in its order."""
    return (
        a_t, b_t, epilogue, pieces, _sharers(tile), tile.rows // _sharers(tile), tile.columns, tile.depth,
        tile.group, tile.stages, tile.split, _BUFFERS,
        _CONSUMER_REGISTERS[_sharers(tile)], _PRODUCER_REGISTERS, tile.preload, tile.tail,
    )  # fmt: skip


def _sharers(tile: Tile) -> int:
    """Consumers that work on one tile."""
    if tile.kernel == "pingpong":
        return 1
    return 3 if tile.rows == 192 else 2


def _blocks(tile: Tile, a_t: bool, b_t: bool) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """TMA boxes of a, b and the output."""
    rows = tile.rows // _sharers(tile)
    a = (tile.depth, rows) if a_t else (rows, tile.depth)
    columns = tile.columns // tile.tail
    b = (columns, tile.depth) if b_t else (tile.depth, columns)
    return a, b, (rows, tile.columns // tile.split)


@lru_cache(maxsize=256)
def _compiled(
    tile: Tile, a_t: bool, b_t: bool, epilogue: str, pieces: bool, dtype: torch.dtype, device: torch.device
):
    """Compile for shapes unknown: only N is assumed to be a multiple of 16.

    Launching the compiled kernel skips Triton's argument binder, which takes longer than a small GEMM does.
    """
    blocks = _blocks(tile, a_t, b_t)
    types = (torch.bfloat16, torch.bfloat16, dtype)
    descriptors = [
        _descriptor(torch.empty(block, dtype=kind, device=device), block)
        for block, kind in zip(blocks, types, strict=True)
    ]
    integers, floats = (torch.empty(16, dtype=kind, device=device) for kind in (torch.int32, torch.float32))
    output = torch.empty(16, dtype=dtype, device=device)
    constants = _constants(tile, a_t, b_t, epilogue, pieces)
    return gemm_kernel.warmup(
        *descriptors, output, integers, integers, floats, floats, *(16,) * 9, *constants,
        grid=(1,), num_warps=4, maxnreg=_REGISTERS[_sharers(tile)],
    )  # fmt: skip


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    epilogue: str,
    *,
    a_transposed: bool,
    b_transposed: bool,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    pieces: Pieces = WHOLE,
    origin: int = 0,
    window: torch.Tensor | None = None,
) -> None:
    """out [M, N] = or += a b, with a [M, K], or [K, M] if transposed, and b [K, N], or [N, K] if transposed.

    bf16 operands, contiguous, N a multiple of 16. scales: f32 [M] and [N] of a chain. Several pieces need the
    `window` i32 [M] that a row's integers may fill where a piece ends.
    """
    m, n = out.shape
    k = a.shape[0] if a_transposed else a.shape[1]
    assert n % 16 == 0
    blocks = _blocks(tile, a_transposed, b_transposed)
    row, column = (_aligned(scale) for scale in scales or (out, out))
    several = pieces.number > 1
    assert not several or window is not None
    kernel = _compiled(tile, a_transposed, b_transposed, epilogue, several, out.dtype, out.device)
    programs = min(-(-m // tile.rows) * -(-n // tile.columns), multiprocessors(out.device))
    bank = _bank(programs, tile, out.device) if several else out
    kernel[(programs, 1, 1)](
        _descriptor(a, blocks[0]), _descriptor(b, blocks[1]), _descriptor(out, blocks[2]),
        out, bank, out if window is None else window, row, column, m, n, k, *pieces, origin,
        *_constants(tile, a_transposed, b_transposed, epilogue, several),
    )  # fmt: skip


def _bank(programs: int, tile: Tile, device: torch.device) -> torch.Tensor:
    """Memory for the integers of chains that have strayed, a part of a tile for every consumer.

    17 MB for tiles of 128 x 256 on 132 multiprocessors; hardly any of it is ever touched.
    """
    parts = max(_sharers(tile), 2)
    return torch.empty(
        programs * parts * (tile.rows // _sharers(tile)) * tile.columns, dtype=torch.int32, device=device
    )


def _aligned(vector: torch.Tensor) -> torch.Tensor:
    """The vector at an address that the compiled kernel may assume."""
    return vector if vector.data_ptr() % 16 == 0 else vector.clone()
