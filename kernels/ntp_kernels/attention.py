"""Causal attention over packed documents with grouped KV heads, forward and backward.

Legend: M tokens = N sequences of S, U local KV heads (units), G query heads per KV head, H head size
(64 or 128).

What moves no bits: a tile of output is one program's work. A program walks the tiles of its own sequence and
head in ascending position with constant tile sizes; dK and dV add the group's query heads in head order.
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
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
    _forward_kernel[grid](
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

    Scores are recomputed twice, once for dK and dV (query tiles ascending inside each head, heads ascending)
    and once for dQ (key tiles ascending): two more products than with atomics, and no order left open.
    """
    tokens, units, group, size = q.shape
    bounds = document_bounds(document, seq_len) if bounds is None else bounds
    heads, sequences = units * group, tokens // seq_len
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    lse2, delta = q.new_empty(2, heads, tokens, dtype=torch.float32)
    shared = (tokens, seq_len, heads, scale, scale * _LOG2E)
    _delta_kernel[(triton.cdiv(tokens, _DELTA_ROWS), heads)](
        dout, out, lse, lse2, delta, tokens, heads, H=size, ROWS=_DELTA_ROWS, num_warps=4
    )
    widen = _interpreted(q)

    def query_side() -> None:
        rows, columns, warps, stages = _QUERY_TILES[size]
        _query_kernel[(heads, triton.cdiv(seq_len, rows), sequences)](
            _tiles(q, rows), _tiles(k, columns), _tiles(v, columns), _tiles(dout, rows), lse2, delta, bounds,
            dq, *shared, G=group, H=size, ROWS=rows, COLUMNS=columns, WIDEN=widen, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip

    def key_side() -> None:
        rows, columns, warps, stages = _KEY_TILES[size]
        _key_kernel[(units, triton.cdiv(seq_len, columns), sequences)](
            _tiles(q, rows), _tiles(k, columns), _tiles(v, columns), _tiles(dout, rows),
            _runs(lse2, rows), _runs(delta, rows), _runs(bounds, rows), bounds, dk, dv,
            *shared, G=group, H=size, ROWS=rows, COLUMNS=columns, WIDEN=widen, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip

    _side_by_side(q.device, query_side, key_side)
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

    With few heads neither fills the card: the longest key tiles run alone at the end. With 8/2 heads and 8192
    tokens of one document the pair takes 845 us instead of 1047, with 32/8 heads 3190 instead of 3248 (H100
    80GB HBM3, 2026-11-28); the other way round the gain is a third of that.
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


@triton.jit
def _dot(a, b, accumulator, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator)


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _forward_span(
    q, k_tiles, v_tiles, accumulator, total, top, low, high, base, unit_column, query, first, scale2,
    MASKED: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles in [low, high) into one query tile's running softmax."""
    for start in range(low, high, COLUMNS):
        k = k_tiles.load([base + start, unit_column])
        scores = _product(q, k.T, WIDEN)
        if MASKED:
            key = start + tl.arange(0, COLUMNS)
            seen = (key[None, :] <= query[:, None]) & (key[None, :] >= first[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale2)
        p = tl.exp2(scores * scale2 - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, axis=1)
        accumulator = accumulator * fade[:, None]
        v = v_tiles.load([base + start, unit_column])
        accumulator = _dot(p.to(v.dtype), v, accumulator, WIDEN)
        top = new_top
    return accumulator, total, top


@triton.jit(do_not_specialize=["heads", "scale2"])
def _forward_kernel(
    q_tiles, k_tiles, v_tiles, out_ptr, lse_ptr, bounds_ptr, seq_len, heads, scale2,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The longest rows first: the short ones fill the gaps at the end.
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    base = tl.program_id(2) * seq_len
    query = start + tl.arange(0, ROWS)
    live = query < seq_len
    first = tl.load(bounds_ptr + base + query, mask=live, other=seq_len)
    end = tl.minimum(start + ROWS, seq_len)
    low = tl.load(bounds_ptr + base + start) // COLUMNS * COLUMNS
    diagonal = start // COLUMNS * COLUMNS
    whole = tl.minimum(tl.cdiv(tl.load(bounds_ptr + base + end - 1), COLUMNS) * COLUMNS, diagonal)
    q = q_tiles.load([base + start, head * H])
    unit_column = head // G * H
    # A finite start keeps exp2 free of NaN in rows that see no key of their first tile.
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, H], tl.float32)
    accumulator, total, top = _forward_span(
        q, k_tiles, v_tiles, accumulator, total, top, low, whole, base, unit_column, query, first, scale2,
        True, COLUMNS, WIDEN,
    )  # fmt: skip
    accumulator, total, top = _forward_span(
        q, k_tiles, v_tiles, accumulator, total, top, whole, diagonal, base, unit_column, query, first,
        scale2, False, COLUMNS, WIDEN,
    )  # fmt: skip
    accumulator, total, top = _forward_span(
        q, k_tiles, v_tiles, accumulator, total, top, diagonal, end, base, unit_column, query, first, scale2,
        True, COLUMNS, WIDEN,
    )  # fmt: skip
    row = (base + query).to(tl.int64) * heads + head
    tl.store(lse_ptr + row, (top + tl.log2(total)) * 0.6931471805599453, mask=live)
    out = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * H + tl.arange(0, H)[None, :], out, mask=live[:, None])


@triton.jit(do_not_specialize=["tokens", "heads"])
def _delta_kernel(
    dout_ptr, out_ptr, lse_ptr, lse2_ptr, delta_ptr, tokens, heads, H: tl.constexpr, ROWS: tl.constexpr
):
    """Write sum(out * dout) and lse in base 2 as [heads, M], rows of one head side by side."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    live = row < tokens
    source = row * heads + head
    offsets = source[:, None] * H + tl.arange(0, H)[None, :]
    dout = tl.load(dout_ptr + offsets, mask=live[:, None], other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, mask=live[:, None], other=0.0).to(tl.float32)
    target = head.to(tl.int64) * tokens + row
    tl.store(delta_ptr + target, tl.sum(out * dout, axis=1), mask=live)
    lse = tl.load(lse_ptr + source, mask=live, other=0.0)
    tl.store(lse2_ptr + target, lse * 1.4426950408889634, mask=live)


@triton.jit
def _key_span(
    k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv, low, high, key, base, rows,
    column, end, scale2, MASKED: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Fold the query tiles in [low, high) of one head into one key tile's gradients, transposed."""
    for start in range(low, high, ROWS):
        q = q_tiles.load([base + start, column])
        lse2 = lse2_tiles.load([rows + start])
        scores = _product(k, q.T, WIDEN)
        p = tl.exp2(scores * scale2 - lse2[None, :])
        if MASKED:
            query = start + tl.arange(0, ROWS)
            first = first_tiles.load([base + start])
            seen = (key[:, None] <= query[None, :]) & (key[:, None] >= first[None, :])
            p = tl.where(seen & (query < end)[None, :], p, 0.0)
        dout = dout_tiles.load([base + start, column])
        dv = _dot(p.to(dout.dtype), dout, dv, WIDEN)
        dp = _product(v, dout.T, WIDEN)
        delta = delta_tiles.load([rows + start])
        ds = p * (dp - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk, WIDEN)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "heads", "scale", "scale2"])
def _key_kernel(
    q_tiles, k_tiles, v_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, bounds_ptr, dk_ptr, dv_ptr,
    tokens, seq_len, heads, scale, scale2,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    start = tl.program_id(1) * COLUMNS
    base = tl.program_id(2) * seq_len
    key = start + tl.arange(0, COLUMNS)
    last = tl.minimum(start + COLUMNS, seq_len) - 1
    past_ptr = bounds_ptr + tokens + base
    end = tl.load(past_ptr + last)
    low = start // ROWS * ROWS
    below = tl.minimum(tl.cdiv(last + 1, ROWS) * ROWS, end)
    whole = tl.maximum(tl.load(past_ptr + start) // ROWS * ROWS, below)
    k = k_tiles.load([base + start, unit * H])
    v = v_tiles.load([base + start, unit * H])
    dk = tl.zeros([COLUMNS, H], tl.float32)
    dv = tl.zeros([COLUMNS, H], tl.float32)
    for member in range(G):
        head = unit * G + member
        rows = head * tokens + base
        dk, dv = _key_span(
            k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv,
            low, below, key, base, rows, head * H, end, scale2, True, ROWS, WIDEN,
        )  # fmt: skip
        dk, dv = _key_span(
            k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv,
            below, whole, key, base, rows, head * H, end, scale2, False, ROWS, WIDEN,
        )  # fmt: skip
        dk, dv = _key_span(
            k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv,
            whole, end, key, base, rows, head * H, end, scale2, True, ROWS, WIDEN,
        )  # fmt: skip
    row = (base + key).to(tl.int64) * (heads // G) + unit
    target = row[:, None] * H + tl.arange(0, H)[None, :]
    live = (key < seq_len)[:, None]
    tl.store(dv_ptr + target, dv.to(dv_ptr.dtype.element_ty), mask=live)
    tl.store(dk_ptr + target, (dk * scale).to(dk_ptr.dtype.element_ty), mask=live)


@triton.jit
def _query_span(
    q, dout, k_tiles, v_tiles, lse2, delta, dq, low, high, base, unit_column, query, first, scale2,
    MASKED: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles in [low, high) into one query tile's gradient."""
    for start in range(low, high, COLUMNS):
        k = k_tiles.load([base + start, unit_column])
        v = v_tiles.load([base + start, unit_column])
        scores = _product(q, k.T, WIDEN)
        p = tl.exp2(scores * scale2 - lse2[:, None])
        if MASKED:
            key = start + tl.arange(0, COLUMNS)
            seen = (key[None, :] <= query[:, None]) & (key[None, :] >= first[:, None])
            p = tl.where(seen, p, 0.0)
        dp = _product(dout, v.T, WIDEN)
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq, WIDEN)
    return dq


@triton.jit(do_not_specialize=["tokens", "heads", "scale", "scale2"])
def _query_kernel(
    q_tiles, k_tiles, v_tiles, dout_tiles, lse2_ptr, delta_ptr, bounds_ptr, dq_ptr,
    tokens, seq_len, heads, scale, scale2,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    base = tl.program_id(2) * seq_len
    query = start + tl.arange(0, ROWS)
    live = query < seq_len
    first = tl.load(bounds_ptr + base + query, mask=live, other=seq_len)
    end = tl.minimum(start + ROWS, seq_len)
    low = tl.load(bounds_ptr + base + start) // COLUMNS * COLUMNS
    diagonal = start // COLUMNS * COLUMNS
    whole = tl.minimum(tl.cdiv(tl.load(bounds_ptr + base + end - 1), COLUMNS) * COLUMNS, diagonal)
    q = q_tiles.load([base + start, head * H])
    dout = dout_tiles.load([base + start, head * H])
    rows = head.to(tl.int64) * tokens + base + query
    lse2 = tl.load(lse2_ptr + rows, mask=live, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=live, other=0.0)
    unit_column = head // G * H
    dq = tl.zeros([ROWS, H], tl.float32)
    dq = _query_span(
        q, dout, k_tiles, v_tiles, lse2, delta, dq, low, whole, base, unit_column, query, first, scale2,
        True, COLUMNS, WIDEN,
    )  # fmt: skip
    dq = _query_span(
        q, dout, k_tiles, v_tiles, lse2, delta, dq, whole, diagonal, base, unit_column, query, first, scale2,
        False, COLUMNS, WIDEN,
    )  # fmt: skip
    dq = _query_span(
        q, dout, k_tiles, v_tiles, lse2, delta, dq, diagonal, end, base, unit_column, query, first, scale2,
        True, COLUMNS, WIDEN,
    )  # fmt: skip
    row = (base + query).to(tl.int64) * heads + head
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + row[:, None] * H + tl.arange(0, H)[None, :], dq, mask=live[:, None])
