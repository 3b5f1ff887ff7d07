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
# pyright: reportReturnType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005 - tuples grow by addition in Triton

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .norm import fold_token_blocks

TOKEN_BLOCK = 32
"""Tokens whose norm weight gradients one program folds. Part of the numerics."""
_STEP = 8
_WARPS = 4
_FORWARD_TOKENS = 64


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
    _forward_kernel[(triton.cdiv(tokens, _FORWARD_TOKENS), units, heads)](
        qkv, positions, cos, sin, qkv if q_weight is None else q_weight, qkv if k_weight is None else
        k_weight, q, k, v, rstd, eps, tokens, units, G=group, H=size, TOKENS=_FORWARD_TOKENS, Q_NORM=q_weight
        is not None, K_NORM=k_weight is not None, num_warps=8,
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

    Order of a unit's weight gradient: the heads of a token left to right, the tokens of a block by one fixed
    tree, then `fold_token_blocks`.
    """
    tokens, units, heads, size = _check(qkv, cos, sin)
    assert dq.is_contiguous()
    assert dk.is_contiguous()
    assert dv.is_contiguous()
    dqkv = torch.empty_like(qkv)
    blocks = triton.cdiv(tokens, TOKEN_BLOCK)
    normed = q_weight is not None or k_weight is not None
    partial = qkv.new_empty((blocks, 2, units, size) if normed else (1,), dtype=torch.float32)
    _backward_kernel[(units, blocks)](
        dq, dk, dv, qkv, positions, cos, sin,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, rstd,
        dqkv, partial, tokens, units,
        G=heads - 2, H=size, TOKENS=TOKEN_BLOCK, STEP=_STEP,
        Q_NORM=q_weight is not None, K_NORM=k_weight is not None, num_warps=_WARPS,
    )  # fmt: skip
    if not normed:
        return dqkv, None, None
    total = fold_token_blocks(partial.flatten(1)).view(2, units, size)
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


@triton.jit
def _head_backward(gradient, head, rstd, cos, sin, weight_ptr, H: tl.constexpr, NORM: tl.constexpr):
    """Return both halves of a head's gradient, and of its products for the norm's weight (zeros without).

    gradient, head: halves of the rotated head's gradient and, with a norm, of the head.
    """
    u, w = gradient[0].to(tl.float32), gradient[1].to(tl.float32)
    da, db = u * cos + w * sin, w * cos - u * sin
    product_a, product_b = da * 0.0, db * 0.0
    if NORM:
        lane = tl.arange(0, H // 2)[None, :]
        weight_a = tl.load(weight_ptr + lane).to(tl.float32)
        weight_b = tl.load(weight_ptr + H // 2 + lane).to(tl.float32)
        a, b = head[0].to(tl.float32) * rstd, head[1].to(tl.float32) * rstd
        product_a, product_b = da * a, db * b
        mean = (tl.sum(product_a * weight_a + product_b * weight_b, axis=1) / H)[:, None]
        da, db = rstd * (da * weight_a - a * mean), rstd * (db * weight_b - b * mean)
    return da, db, product_a, product_b


@triton.jit
def _store_sums(pointer, product_a, product_b, H: tl.constexpr):
    lane = tl.arange(0, H // 2)
    tl.store(pointer + lane, tl.sum(product_a, axis=0))
    tl.store(pointer + H // 2 + lane, tl.sum(product_b, axis=0))


@triton.jit(do_not_specialize=["tokens", "units"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, rstd_ptr,
    dqkv_ptr, partial_ptr, tokens, units, G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """All heads of a unit for TOKENS tokens, STEP at a time: few rows in registers, few sums over threads.

    Units come first in the grid, for neighbours to share pages of memory. A step's loads are all in flight
    before its first store, which they may not pass.
    """
    unit = tl.program_id(0)
    block = tl.program_id(1)
    q_sum_a = tl.zeros([STEP, H // 2], tl.float32)
    q_sum_b = tl.zeros([STEP, H // 2], tl.float32)
    k_sum_a = tl.zeros([STEP, H // 2], tl.float32)
    k_sum_b = tl.zeros([STEP, H // 2], tl.float32)
    for step in range(TOKENS // STEP):
        row = (block * (TOKENS // STEP) + step).to(tl.int64) * STEP + tl.arange(0, STEP)
        live = row < tokens
        mask = live[:, None]
        unit_row = row * units + unit
        source = unit_row * (G + 2)
        gradients, heads, rstds = (), (), ()
        for head in tl.static_range(G):
            gradients = gradients + (_load_halves(dq_ptr, unit_row * G + head, mask, H),)
        gradients = gradients + (_load_halves(dk_ptr, unit_row, mask, H),)
        v_low, v_high = _load_halves(dv_ptr, unit_row, mask, H)
        for head in tl.static_range(G + 1):
            if (head < G and Q_NORM) or (head == G and K_NORM):
                heads = heads + (_load_halves(qkv_ptr, source + head, mask, H),)
                rstd = tl.load(rstd_ptr + unit_row * (G + 1) + head, mask=live, other=0.0)
                rstds = rstds + (rstd[:, None],)
            else:
                heads = heads + (gradients[head],)  # not used
                rstds = rstds + (1.0,)
        cos, sin = _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H)
        for head in tl.static_range(G + 1):
            if head < G:
                da, db, product_a, product_b = _head_backward(
                    gradients[head], heads[head], rstds[head], cos, sin, q_weight_ptr, H, Q_NORM
                )
                q_sum_a += product_a
                q_sum_b += product_b
            else:
                da, db, product_a, product_b = _head_backward(
                    gradients[head], heads[head], rstds[head], cos, sin, k_weight_ptr, H, K_NORM
                )
                k_sum_a += product_a
                k_sum_b += product_b
            _store_halves(dqkv_ptr, source + head, mask, da, db, H)
        _store_halves(dqkv_ptr, source + (G + 1), mask, v_low, v_high, H)
    part = partial_ptr + (block.to(tl.int64) * 2 * units + unit) * H
    if Q_NORM:
        _store_sums(part, q_sum_a, q_sum_b, H)
    if K_NORM:
        _store_sums(part + units * H, k_sum_a, k_sum_b, H)
