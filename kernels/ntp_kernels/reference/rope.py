"""Rotary position embedding of queries and keys, after an optional RMSNorm of every head (QK-norm).

The projection qkv [M, U, G+2, H] holds, for each unit, G query heads, the key head and the value head. The
rotation pairs element h with h + H/2 (the convention of the Hugging Face Llama code). `cos` and `sin` are
f32 [P, H/2], row p for position p.
"""

import torch

from .units import map_units, unit_blocks


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

    `positions` is i32 [M]; the weights [H] come both or not at all, and rstd is 1 without them.
    """
    heads = qkv[:, :, :-1].float()
    rstd = heads.new_ones(heads.shape[:3])
    if q_weight is not None and k_weight is not None:
        rstd = _rstd(heads, eps)
        heads = heads * rstd.unsqueeze(3) * _head_weights(q_weight, k_weight, heads.shape[2])
    rotated = _rotate(heads, *_angles(cos, sin, positions)).to(qkv.dtype)
    return rotated[:, :, :-1].contiguous(), rotated[:, :, -1].contiguous(), qkv[:, :, -1].contiguous(), rstd


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
    """Return dqkv [M, U, G+2, H] and, with weights, their gradients PER UNIT, f32 [U, H] each.

    The caller adds the units of all ranks in unit order. Order per unit: one sum over tokens and heads.
    """
    cos, sin = _angles(cos, sin, positions)
    dheads = _rotate(torch.cat([dq, dk.unsqueeze(2)], 2).float(), cos, -sin)
    dq_weight = dk_weight = None
    if q_weight is not None and k_weight is not None:
        normed = qkv[:, :, :-1].float() * rstd.unsqueeze(3)
        dq_weight, dk_weight = _weight_grads(dheads * normed)
        dheads = dheads * _head_weights(q_weight, k_weight, normed.shape[2])
        dheads = (dheads - normed * _head_means(dheads * normed)) * rstd.unsqueeze(3)
    dqkv = torch.cat([dheads.to(qkv.dtype), dv.unsqueeze(2)], 2)
    return dqkv, dq_weight, dk_weight


def _angles(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the tables for `positions`, ready to broadcast over [M, U, heads, H/2]."""
    return cos[positions][:, None, None], sin[positions][:, None, None]


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _head_weights(q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return f32 [heads, H]: the weight of every query head, then the key head's."""
    return torch.stack([q_weight.float()] * (heads - 1) + [k_weight.float()])


def _head_means(heads: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of [M, U, heads, H], one call per unit, as [M, U, heads, 1]."""
    return map_units(lambda block: block.mean(-1, keepdim=True), heads)


def _rstd(heads: torch.Tensor, eps: float) -> torch.Tensor:
    return map_units(lambda block: block.square().mean(-1).add_(eps).rsqrt_(), heads)


def _weight_grads(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over tokens of the query part (over heads too) and of the key part, f32 [U, H] each."""
    queries = products.new_empty(products.shape[1], products.shape[3])
    keys = torch.empty_like(queries)
    for unit, block in enumerate(unit_blocks(products)):
        queries[unit] = block[:, :-1].contiguous().sum((0, 1))
        keys[unit] = block[:, -1].contiguous().sum(0)
    return queries, keys
