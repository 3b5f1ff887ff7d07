"""Split of the packed QKV activations, optional per-head RMSNorm of queries and keys, rotary embedding.

Legend: M tokens, U local KV groups (units), G query heads per group, H head size, P positions in the tables.
Packed rows of one unit are G query heads, the key head, the value head. Rotate-half convention of Hugging
Face Llama: with halves (a, b) of a head, `(a cos - b sin, b cos + a sin)`. fp32 inside, one rounding per
output.

What moves no bits: everything but the norms is elementwise; a head's norm is one program's sum whose order
depends on H alone. Norm weight gradients are per unit (heads and token blocks in fixed order), so the caller
can add units in global unit order on any mesh. No atomics.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from .norm import fold_token_blocks

TOKEN_BLOCK = 16
"""Tokens whose norm weight gradients one program folds. Part of the numerics."""


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
    norm, and rstd is 1 there. The norm comes before the rotation.
    """
    tokens, units, heads, size = _check(qkv, cos, sin)
    group = heads - 2
    q = qkv.new_empty(tokens, units, group, size)
    k, v = qkv.new_empty(tokens, units, size), qkv.new_empty(tokens, units, size)
    rstd = qkv.new_empty(tokens, units, group + 1, dtype=torch.float32)
    _forward_kernel[(triton.cdiv(tokens, TOKEN_BLOCK), units)](
        qkv, positions, cos, sin, qkv if q_weight is None else q_weight, qkv if k_weight is None else
        k_weight, q, k, v, rstd, eps, tokens, units, G=group, H=size, TOKENS=TOKEN_BLOCK, Q_NORM=q_weight is
        not None, K_NORM=k_weight is not None, num_warps=4,
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
    """Return dqkv [M, U, G+2, H] and the norm weight gradients per unit, f32 [U, H] each (None without a norm).

    Order of a unit's weight gradient: in each block of 16 tokens, heads in order, each by a fixed tree over
    the tokens; then the blocks of the call by `norm.fold_token_blocks`.
    """
    tokens, units, heads, size = _check(qkv, cos, sin)
    assert dq.is_contiguous()
    assert dk.is_contiguous()
    assert dv.is_contiguous()
    dqkv = torch.empty_like(qkv)
    blocks = triton.cdiv(tokens, TOKEN_BLOCK)
    normed = q_weight is not None or k_weight is not None
    partial = qkv.new_empty((blocks, units, 2, size) if normed else (1,), dtype=torch.float32)
    _backward_kernel[(blocks, units)](
        dq, dk, dv, qkv, positions, cos, sin,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, rstd,
        dqkv, partial, tokens, units,
        G=heads - 2, H=size, TOKENS=TOKEN_BLOCK,
        Q_NORM=q_weight is not None, K_NORM=k_weight is not None, num_warps=4,
    )  # fmt: skip
    if not normed:
        return dqkv, None, None
    total = fold_token_blocks(partial.view(blocks, -1)).view(units, 2, size)
    dq_weight = total[:, 0].contiguous() if q_weight is not None else None
    return dqkv, dq_weight, total[:, 1].contiguous() if k_weight is not None else None


def _check(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[int, int, int, int]:
    tokens, units, heads, size = qkv.shape
    assert qkv.is_contiguous()
    assert size % 16 == 0
    assert size & (size - 1) == 0
    assert cos.shape[1] == sin.shape[1] == size // 2
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    return tokens, units, heads, size


@triton.jit
def _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H: tl.constexpr):
    """Load cos and sin [TOKENS, H/2] of the rows' positions."""
    half: tl.constexpr = H // 2
    position = tl.load(positions_ptr + row, mask=live, other=0).to(tl.int64)
    offsets = position[:, None] * half + tl.arange(0, half)[None, :]
    return tl.load(cos_ptr + offsets), tl.load(sin_ptr + offsets)


@triton.jit(do_not_specialize=["tokens", "units"])
def _forward_kernel(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr, rstd_ptr, eps,
    tokens, units, G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = H // 2
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = row < tokens
    mask = live[:, None]
    cos, sin = _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H)
    unit_row = row * units + tl.program_id(1)
    lane = tl.arange(0, half)[None, :]
    for head in tl.static_range(G + 1):
        source = qkv_ptr + (unit_row * (G + 2) + head)[:, None] * H + lane
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.full([TOKENS], 1.0, tl.float32)
        if Q_NORM if head < G else K_NORM:
            weight_ptr = q_weight_ptr if head < G else k_weight_ptr
            rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / H + eps)
            a = a * rstd[:, None] * tl.load(weight_ptr + lane).to(tl.float32)
            b = b * rstd[:, None] * tl.load(weight_ptr + half + lane).to(tl.float32)
        tl.store(rstd_ptr + unit_row * (G + 1) + head, rstd, mask=live)
        target = (
            q_ptr + (unit_row * G + head)[:, None] * H if head < G else k_ptr + unit_row[:, None] * H
        ) + lane
        tl.store(target, (a * cos - b * sin).to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(target + half, (b * cos + a * sin).to(q_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, H)[None, :]
    value = tl.load(qkv_ptr + (unit_row * (G + 2) + G + 1)[:, None] * H + column, mask=mask, other=0.0)
    tl.store(v_ptr + unit_row[:, None] * H + column, value, mask=mask)


@triton.jit(do_not_specialize=["tokens", "units"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, rstd_ptr,
    dqkv_ptr, partial_ptr, tokens, units, G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = H // 2
    block, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = block * TOKENS + tl.arange(0, TOKENS)
    live = row < tokens
    mask = live[:, None]
    cos, sin = _rotation(positions_ptr, cos_ptr, sin_ptr, row, live, H)
    unit_row = row * units + unit
    lane = tl.arange(0, half)[None, :]
    total_a = tl.zeros([half], tl.float32)
    total_b = tl.zeros([half], tl.float32)
    for head in tl.static_range(G + 1):
        source = (
            dq_ptr + (unit_row * G + head)[:, None] * H if head < G else dk_ptr + unit_row[:, None] * H
        ) + lane
        u = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        da, db = u * cos + w * sin, w * cos - u * sin
        offsets = (unit_row * (G + 2) + head)[:, None] * H + lane
        if Q_NORM if head < G else K_NORM:
            weight_ptr = q_weight_ptr if head < G else k_weight_ptr
            rstd = tl.load(rstd_ptr + unit_row * (G + 1) + head, mask=live, other=0.0)[:, None]
            a = tl.load(qkv_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * rstd
            b = tl.load(qkv_ptr + offsets + half, mask=mask, other=0.0).to(tl.float32) * rstd
            total_a += tl.sum(da * a, axis=0)
            total_b += tl.sum(db * b, axis=0)
            da *= tl.load(weight_ptr + lane).to(tl.float32)
            db *= tl.load(weight_ptr + half + lane).to(tl.float32)
            mean = (tl.sum(da * a + db * b, axis=1) / H)[:, None]
            da, db = rstd * (da - a * mean), rstd * (db - b * mean)
        tl.store(dqkv_ptr + offsets, da.to(dqkv_ptr.dtype.element_ty), mask=mask)
        tl.store(dqkv_ptr + offsets + half, db.to(dqkv_ptr.dtype.element_ty), mask=mask)
        if (Q_NORM or K_NORM) and head >= G - 1:  # the queries' total is complete after head G - 1
            target = partial_ptr + ((block * units + unit) * 2 + head - (G - 1)) * H + tl.arange(0, half)
            tl.store(target, total_a)
            tl.store(target + half, total_b)
            total_a = tl.zeros([half], tl.float32)
            total_b = tl.zeros([half], tl.float32)
    column = tl.arange(0, H)[None, :]
    dv = tl.load(dv_ptr + unit_row[:, None] * H + column, mask=mask, other=0.0)
    tl.store(dqkv_ptr + (unit_row * (G + 2) + G + 1)[:, None] * H + column, dv, mask=mask)
