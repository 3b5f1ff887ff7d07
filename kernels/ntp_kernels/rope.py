"""Split of the packed QKV activations, optional per-head RMSNorm of queries and keys, rotary embedding.

Legend: M tokens, U local KV groups (units), G query heads per group, H head size, P positions in the tables.
Packed rows of one unit are G query heads, the key head, the value head. Rotate-half convention of Hugging
Face Llama: with halves (a, b) of a head, `(a cos - b sin, b cos + a sin)`. fp32 inside, one rounding per
output.

What moves no bits: everything but the norms is elementwise; a head's norm is one program's sum whose order
depends on H alone. Norm weight gradients are per unit (token blocks and heads in fixed order), so the caller
can add units in global unit order on any mesh. No atomics.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

TOKEN_BLOCK = 64
"""Tokens whose norm weight gradients one program folds. Part of the numerics."""

_FOLD_ROWS = 256
_FOLD_COLUMNS = 16


def qk_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [M, U, G, H], k [M, U, H], v [M, U, H] and rstd f32 [M, U, G+1] (queries, then the key).

    qkv [M, U, G+2, H]; positions i32 [M] index the tables cos, sin f32 [P, H/2]. A weight [H] of None: no
    norm, and rstd is 1 there. The norm comes before the rotation; v is a copy.
    """
    tokens, units, heads, size = _check(qkv, cos, sin)
    group = heads - 2
    q = qkv.new_empty(tokens, units, group, size)
    k, v = qkv.new_empty(tokens, units, size), qkv.new_empty(tokens, units, size)
    rstd = qkv.new_empty(tokens, units, group + 1, dtype=torch.float32)
    _forward_kernel[(triton.cdiv(tokens, TOKEN_BLOCK), units, heads)](
        qkv, positions, cos, sin, qkv if q_weight is None else q_weight, qkv if k_weight is None else
        k_weight, q, k, v, rstd, eps, tokens, units, G=group, H=size, TOKENS=TOKEN_BLOCK, Q_NORM=q_weight is
        not None, K_NORM=k_weight is not None, num_warps=8,
    )  # fmt: skip
    return q, k, v, rstd


def qk_norm_rope_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dqkv [M, U, G+2, H] and the norm weight gradients per unit, f32 [U, H] each (None without).

    Order of a unit's weight gradient: the tokens of a block and head by one fixed tree, then `_fold_heads`.
    """
    tokens, units, heads, size = _check(qkv, cos, sin)
    assert dq.is_contiguous()
    assert dk.is_contiguous()
    assert dv.is_contiguous()
    dqkv = torch.empty_like(qkv)
    blocks = triton.cdiv(tokens, TOKEN_BLOCK)
    normed = q_weight is not None or k_weight is not None
    partial = qkv.new_empty((blocks, units, heads - 1, size) if normed else (1,), dtype=torch.float32)
    _backward_kernel[(blocks, units, heads)](
        dq, dk, dv, qkv, positions, cos, sin,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, rstd,
        dqkv, partial, tokens, units,
        G=heads - 2, H=size, TOKENS=TOKEN_BLOCK,
        Q_NORM=q_weight is not None, K_NORM=k_weight is not None, num_warps=8,
    )  # fmt: skip
    if not normed:
        return dqkv, None, None
    total = _fold_heads(partial)
    return dqkv, None if q_weight is None else total[0], None if k_weight is None else total[1]


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    qkv, weight = pattern((40, 2, 4, 64), device, 21), pattern((2, 64), device, 22)
    positions = torch.arange(40, device=device, dtype=torch.int32)
    table = pattern((40, 32), device, 23).float()
    q, k, v, rstd = qk_norm_rope(qkv, positions, table, table, weight[0], weight[1], 1e-6)
    gradients = qk_norm_rope_backward(q, k, v, qkv, positions, table, table, weight[0], weight[1], rstd)
    yield from (q, k, v, rstd, *(g for g in gradients if g is not None))


def _fold_heads(partial: torch.Tensor) -> torch.Tensor:
    """Sum f32 [blocks, U, G+1, H] to f32 [2, U, H]: over blocks and query heads, and over blocks for the key.

    Order: (block, head) pairs, heads fastest, in runs of 256 by one fixed tree, runs left to right.
    """
    blocks, units, heads, size = partial.shape
    out = partial.new_empty(2, units, size)
    _fold_kernel[(units, triton.cdiv(size, _FOLD_COLUMNS), 2)](
        partial, out, blocks, units,
        G=heads - 1, H=size, ROWS=_FOLD_ROWS, COLUMNS=min(_FOLD_COLUMNS, size), num_warps=4,
    )  # fmt: skip
    return out


def _check(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[int, int, int, int]:
    tokens, units, heads, size = qkv.shape
    assert qkv.is_contiguous()
    assert size >= 16
    assert size & (size - 1) == 0
    for table in (cos, sin):
        assert table.is_contiguous()
        assert table.dtype == torch.float32
        assert table.shape[1] == size // 2
    return tokens, units, heads, size


@triton.jit
def _rows(tokens, TOKENS: tl.constexpr):
    """Return the program's token rows [TOKENS] and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    return row, row < tokens


@triton.jit
def _load_halves(pointer, row, mask, H: tl.constexpr):
    """Load both halves [TOKENS, H/2] of heads that start at rows `row` of [*, H]."""
    source = pointer + row[:, None] * H + tl.arange(0, H // 2)[None, :]
    return tl.load(source, mask=mask, other=0.0), tl.load(source + H // 2, mask=mask, other=0.0)


@triton.jit
def _store_halves(pointer, row, mask, low, high, H: tl.constexpr):
    target = pointer + row[:, None] * H + tl.arange(0, H // 2)[None, :]
    tl.store(target, low.to(pointer.dtype.element_ty), mask=mask)
    tl.store(target + H // 2, high.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H: tl.constexpr):
    """Load cos and sin [TOKENS, H/2] of the rows' positions."""
    half: tl.constexpr = H // 2
    position = tl.load(positions_ptr + row, mask=live, other=0).to(tl.int64)
    offsets = position[:, None] * half + tl.arange(0, half)[None, :]
    return tl.load(cos_ptr + offsets), tl.load(sin_ptr + offsets)


@triton.jit
def _head_weight(q_weight_ptr, k_weight_ptr, head, G: tl.constexpr, H: tl.constexpr, Q_NORM, K_NORM):
    """Return whether the head is normed, and both halves [1, H/2] of its weight (1 where it is not)."""
    normed = (head < G and Q_NORM) or (head == G and K_NORM)
    pointer = q_weight_ptr
    if head == G:
        pointer = k_weight_ptr
    lane = tl.arange(0, H // 2)[None, :]
    low = tl.load(pointer + lane, mask=normed & (lane >= 0), other=1.0).to(tl.float32)
    high = tl.load(pointer + H // 2 + lane, mask=normed & (lane >= 0), other=1.0).to(tl.float32)
    return normed, low, high


@triton.jit(do_not_specialize=["tokens", "units"])
def _forward_kernel(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr, rstd_ptr, eps,
    tokens, units, G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    row, live = _rows(tokens, TOKENS)
    mask = live[:, None]
    unit_row = row * units + tl.program_id(1)
    low, high = _load_halves(qkv_ptr, unit_row * (G + 2) + head, mask, H)
    # A branch per output, not a chosen pointer: that loses its alignment, and with it the wide stores.
    if head > G:
        _store_halves(v_ptr, unit_row, mask, low, high, H)
    else:
        a, b = low.to(tl.float32), high.to(tl.float32)
        rstd = tl.full([TOKENS], 1.0, tl.float32)
        if Q_NORM or K_NORM:
            normed, weight_a, weight_b = _head_weight(q_weight_ptr, k_weight_ptr, head, G, H, Q_NORM, K_NORM)
            rstd = tl.where(normed, tl.rsqrt(tl.sum(a * a + b * b, axis=1) / H + eps), 1.0)
            a = a * rstd[:, None] * weight_a
            b = b * rstd[:, None] * weight_b
        tl.store(rstd_ptr + unit_row * (G + 1) + head, rstd, mask=live)
        cos, sin = _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H)
        c, d = a * cos - b * sin, b * cos + a * sin
        if head < G:
            _store_halves(q_ptr, unit_row * G + head, mask, c, d, H)
        else:
            _store_halves(k_ptr, unit_row, mask, c, d, H)


@triton.jit(do_not_specialize=["tokens", "units"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, rstd_ptr,
    dqkv_ptr, partial_ptr, tokens, units, G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = H // 2
    head = tl.program_id(2)
    row, live = _rows(tokens, TOKENS)
    mask = live[:, None]
    unit_row = row * units + tl.program_id(1)
    target = unit_row * (G + 2) + head
    if head > G:
        low, high = _load_halves(dv_ptr, unit_row, mask, H)
        _store_halves(dqkv_ptr, target, mask, low, high, H)
    else:
        if head < G:
            low, high = _load_halves(dq_ptr, unit_row * G + head, mask, H)
        else:
            low, high = _load_halves(dk_ptr, unit_row, mask, H)
        if Q_NORM or K_NORM:  # loaded before the rotation, so that all reads are in flight together
            a, b = _load_halves(qkv_ptr, target, mask, H)
        cos, sin = _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H)
        u, w = low.to(tl.float32), high.to(tl.float32)
        da, db = u * cos + w * sin, w * cos - u * sin
        if Q_NORM or K_NORM:
            normed, weight_a, weight_b = _head_weight(q_weight_ptr, k_weight_ptr, head, G, H, Q_NORM, K_NORM)
            rstd = tl.load(rstd_ptr + unit_row * (G + 1) + head, mask=live, other=0.0)[:, None]
            a, b = a.to(tl.float32) * rstd, b.to(tl.float32) * rstd
            block = tl.program_id(0).to(tl.int64) * units + tl.program_id(1)
            part = partial_ptr + (block * (G + 1) + head) * H + tl.arange(0, half)
            tl.store(part, tl.sum(da * a, axis=0))
            tl.store(part + half, tl.sum(db * b, axis=0))
            da *= weight_a
            db *= weight_b
            mean = (tl.sum(da * a + db * b, axis=1) / H)[:, None]
            da = tl.where(normed, rstd * (da - a * mean), da)
            db = tl.where(normed, rstd * (db - b * mean), db)
        _store_halves(dqkv_ptr, target, mask, da, db, H)


@triton.jit(do_not_specialize=["blocks", "units"])
def _fold_kernel(
    partial_ptr,
    out_ptr,
    blocks,
    units,
    G: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    unit, is_key = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.where(is_key == 1, 1, G)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, blocks * count, ROWS):
        row = start + tl.arange(0, ROWS)
        head = (row // count).to(tl.int64) * units * (G + 1) + unit * (G + 1) + is_key * G + row % count
        mask = (row < blocks * count)[:, None]
        total += tl.sum(
            tl.load(partial_ptr + head[:, None] * H + column[None, :], mask=mask, other=0.0), axis=0
        )
    tl.store(out_ptr + (is_key * units + unit) * H + column, total)
