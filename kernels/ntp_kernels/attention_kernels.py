"""The Triton kernels behind `attention`. Contracts, orders and tile sizes are there.

Shapes inside: a query tile is ROWS tokens, a key tile COLUMNS tokens, of one head of size H. Tiles come
through TMA descriptors over [M, heads * H]; tokens past the last one read as zero, and those of the next
sequence are masked. `scale2` is the softmax scale times log2(e): exponentials are powers of two. Loops are
cut in three, so that only tiles on a document's edge or on the diagonal pay for the mask. WIDEN: see
`attention._interpreted`.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


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
def forward_kernel(
    q_tiles, k_tiles, v_tiles, out_ptr, lse_ptr, bounds_ptr, seq_len, heads, scale2,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write out [M, heads * H] and lse [M, heads] (natural log) of one query tile of one head.

    Grid: heads, query tiles of a sequence, sequences; bounds_ptr holds each query's first visible key.
    """
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
def delta_kernel(
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


@triton.jit(do_not_specialize=["tokens", "heads", "scale2"])
def key_kernel(
    q_tiles, k_tiles, v_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, bounds_ptr,
    dk_part_ptr, dv_part_ptr, tokens, seq_len, heads, scale2,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write what one query head gives to the gradients of one key tile, float32 [M, heads * H] each.

    Grid: heads, key tiles of a sequence, sequences. `group_kernel` adds the heads of a group, in order.
    """
    head = tl.program_id(0)
    unit_column = head // G * H
    column = head * H
    start = tl.program_id(1) * COLUMNS
    base = tl.program_id(2) * seq_len
    key = start + tl.arange(0, COLUMNS)
    last = tl.minimum(start + COLUMNS, seq_len) - 1
    past_ptr = bounds_ptr + tokens + base
    end = tl.load(past_ptr + last)
    low = start // ROWS * ROWS
    below = tl.minimum(tl.cdiv(last + 1, ROWS) * ROWS, end)
    whole = tl.maximum(tl.load(past_ptr + start) // ROWS * ROWS, below)
    k = k_tiles.load([base + start, unit_column])
    v = v_tiles.load([base + start, unit_column])
    dk = tl.zeros([COLUMNS, H], tl.float32)
    dv = tl.zeros([COLUMNS, H], tl.float32)
    rows = head * tokens + base
    dk, dv = _key_span(
        k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv,
        low, below, key, base, rows, column, end, scale2, True, ROWS, WIDEN,
    )  # fmt: skip
    dk, dv = _key_span(
        k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv,
        below, whole, key, base, rows, column, end, scale2, False, ROWS, WIDEN,
    )  # fmt: skip
    dk, dv = _key_span(
        k, v, q_tiles, dout_tiles, lse2_tiles, delta_tiles, first_tiles, dk, dv,
        whole, end, key, base, rows, column, end, scale2, True, ROWS, WIDEN,
    )  # fmt: skip
    row = (base + key).to(tl.int64) * heads + head
    target = row[:, None] * H + tl.arange(0, H)[None, :]
    live = (key < seq_len)[:, None]
    tl.store(dv_part_ptr + target, dv, mask=live)
    tl.store(dk_part_ptr + target, dk, mask=live)


@triton.jit(do_not_specialize=["rows", "scale"])
def group_kernel(
    parts_ptr, dk_ptr, dv_ptr, rows, scale, G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr
):
    """Add the heads of a group left to right: parts [2, M * U, G, H] to dk and dv [M * U, H]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    column = tl.arange(0, H)[None, :]
    dk_parts = parts_ptr + row[:, None] * (G * H) + column
    dv_parts = dk_parts + rows.to(tl.int64) * (G * H)
    dk = tl.zeros([ROWS, H], tl.float32)
    dv = tl.zeros([ROWS, H], tl.float32)
    for member in tl.static_range(G):
        dk += tl.load(dk_parts + member * H, mask=live, other=0.0)
        dv += tl.load(dv_parts + member * H, mask=live, other=0.0)
    target = row[:, None] * H + column
    tl.store(dk_ptr + target, (dk * scale).to(dk_ptr.dtype.element_ty), mask=live)
    tl.store(dv_ptr + target, dv.to(dv_ptr.dtype.element_ty), mask=live)


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
def query_kernel(
    q_tiles, k_tiles, v_tiles, dout_tiles, lse2_ptr, delta_ptr, bounds_ptr, dq_ptr,
    tokens, seq_len, heads, scale, scale2,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write dq [M, heads * H] of one query tile of one head; grid as in `forward_kernel`."""
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
