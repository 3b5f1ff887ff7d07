"""Causal attention over packed documents with grouped KV heads, forward and backward.

Legend: M tokens = N sequences of S, U local KV heads (units), G query heads per KV head, H head size
(64 or 128).

What moves no bits: a tile of output is one program's work. A program walks the tiles of its own sequence and
head in ascending position with constant tile sizes; dK and dV are made per
query head and added in head order.
There are no atomics and no splits, so bits do not depend on the number of heads or sequences in the call, nor
on the multiprocessor count. Tiles start at the sequence's first token. Which tiles are skipped follows from
the document bounds alone.

A document is a run of equal ids; an id that returns later in the sequence is another document.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Callable, Iterator

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_kernels import delta_kernel, forward_kernel, group_kernel, key_kernel, query_kernel

_LOG2E = 1.4426950408889634


def document_bounds(document: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return i32 [2, M]: first and one past the last position, in its sequence, of a token's document."""
    ids = document.view(-1, seq_len)
    position = torch.arange(seq_len, device=ids.device, dtype=torch.int32).expand_as(ids)
    edge = ids[:, 1:] != ids[:, :-1]
    border = torch.ones_like(ids[:, :1], dtype=torch.bool)
    first = torch.where(torch.cat([border, edge], 1), position, 0).cummax(1).values
    past = torch.where(torch.cat([edge, border], 1), position + 1, seq_len).flip(1).cummin(1).values.flip(1)
    return torch.stack([first.flatten(), past.flatten()]).to(torch.int32)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document: torch.Tensor,
    seq_len: int,
    scale: float,
    bounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [M, U, G, H] and lse f32 [M, U, G], the natural log of the sum of exp(scale * q k).

    q [M, U, G, H], k and v [M, U, H]; token i sees token j of its own sequence when j <= i and both are in
    one run of `document` i32 [M]. `bounds` spares recomputing `document_bounds(document, seq_len)` in every
    layer. Softmax in fp32, probabilities rounded to the input dtype before the product with v, one rounding
    of out.
    """
    tokens, units, group, size = q.shape
    bounds = document_bounds(document, seq_len) if bounds is None else bounds
    out, lse = torch.empty_like(q), q.new_empty(tokens, units, group, dtype=torch.float32)
    rows, columns, warps, stages = _FORWARD_TILES[size]
    grid = (units * group, triton.cdiv(seq_len, rows), tokens // seq_len)
    forward_kernel[grid](
        _tiles(q, rows), _tiles(k, columns), _tiles(v, columns), out, lse, bounds,
        seq_len, units * group, scale * _LOG2E,
        G=group, H=size, ROWS=rows, COLUMNS=columns, WIDEN=_interpreted(q), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out, lse


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    document: torch.Tensor,
    seq_len: int,
    scale: float,
    bounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq [M, U, G, H], dk and dv [M, U, H] for dout [M, U, G, H]; `out` and `lse` from `attention`.

    Scores are recomputed twice, once for dK and dV (query tiles ascending, then the heads of the group left
    to right, in fp32) and once for dQ (key tiles ascending): two more products than with atomics, and no
    order left open. A program per query head, not per KV head: at high tensor-parallel degrees a rank has one
    or two KV heads, too few for the card. The price is fp32 scratch of four times the bytes of q.
    """
    tokens, units, group, size = q.shape
    bounds = document_bounds(document, seq_len) if bounds is None else bounds
    heads, sequences = units * group, tokens // seq_len
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    parts = q.new_empty(2, *q.shape, dtype=torch.float32)
    lse2, delta = q.new_empty(2, heads, tokens, dtype=torch.float32)
    delta_kernel[(triton.cdiv(tokens, _DELTA_ROWS), heads)](
        dout, out, lse, lse2, delta, tokens, heads, H=size, ROWS=_DELTA_ROWS, num_warps=4
    )
    widen = _interpreted(q)
    rows, columns, warps, stages = _KEY_TILES[size]
    key_kernel[(heads, triton.cdiv(seq_len, columns), sequences)](
        _tiles(q, rows), _tiles(k, columns), _tiles(v, columns), _tiles(dout, rows),
        _runs(lse2, rows), _runs(delta, rows), _runs(bounds, rows), bounds, parts[0], parts[1],
        tokens, seq_len, heads, scale * _LOG2E,
        G=group, H=size, ROWS=rows, COLUMNS=columns, WIDEN=widen, num_warps=warps, num_stages=stages,
    )  # fmt: skip

    def fold() -> None:
        group_kernel[(triton.cdiv(tokens * units, _DELTA_ROWS),)](
            parts, dk, dv, tokens * units, scale, G=group, H=size, ROWS=_DELTA_ROWS, num_warps=4
        )

    def query_side() -> None:
        rows, columns, warps, stages = _QUERY_TILES[size]
        query_kernel[(heads, triton.cdiv(seq_len, rows), sequences)](
            _tiles(q, rows), _tiles(k, columns), _tiles(v, columns), _tiles(dout, rows), lse2, delta, bounds,
            dq, tokens, seq_len, heads, scale, scale * _LOG2E,
            G=group, H=size, ROWS=rows, COLUMNS=columns, WIDEN=widen, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    _side_by_side(q.device, fold, query_side)
    return dq, dk, dv


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    q, dout = pattern((2 * 192, 2, 2, 128), device, 41), pattern((2 * 192, 2, 2, 128), device, 42)
    k, v = pattern((2 * 192, 2, 128), device, 43), pattern((2 * 192, 2, 128), device, 44)
    document = (torch.arange(2 * 192, device=device) % 192 // 100).to(torch.int32)
    out, lse = attention(q, k, v, document, 192, 0.25)
    yield from (out, lse, *attention_backward(dout, q, k, v, out, lse, document, 192, 0.25))


# Per head size: rows (queries), columns (keys), warps, stages. Constants: rows and columns are part of the
# numerics. The fastest of 5 to 10 tried each on an H100 80GB HBM3, 2026-11-28 (figures in kernels/README.md).
_FORWARD_TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}
_KEY_TILES = {64: (128, 64, 4, 2), 128: (64, 64, 4, 2)}
_QUERY_TILES = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)}
_DELTA_ROWS = 32


def _side_by_side(device: torch.device, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Launch two independent kernels on two streams, joined before this returns to the current one.

    The fold of dK and dV waits for memory, the kernel of dQ for the tensor cores.
    """
    if device.type == "cpu":
        first()
        second()
        return
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        first()
    second()
    current.wait_stream(side)


def _tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe x [M, ..., H] as a matrix [M, heads * H] read in tiles of `rows` tokens of one head."""
    assert x.is_contiguous()
    flat = x.view(x.shape[0], -1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, x.shape[-1]])


def _runs(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe a contiguous x as one long vector read in runs of `rows`."""
    return TensorDescriptor(x.view(-1), [x.numel()], [1], [rows])


def _interpreted(x: torch.Tensor) -> bool:
    """Triton's interpreter multiplies bf16 matrices wrongly: on CPU tensors the kernels widen them first."""
    return x.device.type == "cpu"
