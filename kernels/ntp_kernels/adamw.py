"""AdamW on flat float32 buffers, and squared sums per fixed block for the gradient norm.

AdamW is elementwise: an element's bits depend on its own four values and the scalars, never on where a shard
or a flat buffer begins. `square_sums` gives one float64 per fixed block; the caller adds blocks in canonical
order. The scalars are Python floats, combined in double precision on the host (bias corrections too) and
rounded once.
"""

# Triton types neither its launch keywords nor what its builtins return.
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 1024
_SUM_TILE = 1024


def adamw(
    master: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    *,
    grad_scale: float = 1.0,
    copy: torch.Tensor | None = None,
) -> None:
    """Take step number `step` (from 1) of AdamW in place on f32 [n] buffers.

    `grad_scale` multiplies the gradient first (clip coefficient over token count). `copy` [n], usually bf16,
    receives the new weights rounded to its dtype. Rule: `w *= 1 - lr * weight_decay`, moments with weights `1
    - beta`, then `w -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)` with correctly rounded sqrt
    and division.
    """
    count = master.numel()
    assert step >= 1
    assert all(t.numel() == count and t.is_contiguous() and t.dtype == torch.float32 for t in (m, v, grad))
    target = master if copy is None else copy
    assert target.numel() == count
    assert target.is_contiguous()
    if count == 0:
        return
    arguments: tuple[Any, ...] = (
        lr / (1 - beta1**step), 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2,
        1 / (1 - beta2**step), eps, grad_scale,
    )  # fmt: skip
    _adamw_kernel[(triton.cdiv(count, _TILE),)](
        master, m, v, grad, target, *arguments, count, TILE=_TILE, COPY=copy is not None, num_warps=4
    )


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of every row of f32 x [n, block] as f64 [n].

    Order: squares exact in float64; column j of runs of 1024 is added left to right, then one fixed tree over
    j. The order depends on `block` only.
    """
    assert x.ndim == 2
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    out = x.new_empty(x.shape[0], dtype=torch.float64)
    if x.shape[0]:
        _square_sums_kernel[(x.shape[0],)](x, out, x.shape[1], TILE=_SUM_TILE, num_warps=4)
    return out


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield fixed results for `selftest.fingerprint`."""
    from .selftest import pattern

    master, m, grad = (pattern((3000,), device, seed).float() for seed in (71, 72, 73))
    v, copy = grad.square(), torch.empty(3000, device=device, dtype=torch.bfloat16)
    sums = square_sums(grad.view(3, 1000))
    adamw(master, m, v, grad, 1e-3, 0.9, 0.95, 1e-8, 0.1, 3, grad_scale=0.5, copy=copy)
    yield from (master, m, v, copy, sums)


@triton.jit(do_not_specialize=["count"])
def _adamw_kernel(
    master_ptr, m_ptr, v_ptr, grad_ptr, copy_ptr, rate, keep, beta1, one_minus_beta1, beta2, one_minus_beta2,
    v_correction, eps, grad_scale, count, TILE: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < count
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0) * grad_scale
    m = tl.load(m_ptr + index, mask=inside, other=0.0) * beta1 + grad * one_minus_beta1
    v = tl.load(v_ptr + index, mask=inside, other=0.0) * beta2 + grad * grad * one_minus_beta2
    tl.store(m_ptr + index, m, mask=inside)
    tl.store(v_ptr + index, v, mask=inside)
    denominator = tl.sqrt_rn(v * v_correction) + eps
    master = tl.load(master_ptr + index, mask=inside, other=0.0) * keep - rate * tl.div_rn(m, denominator)
    tl.store(master_ptr + index, master, mask=inside)
    if COPY:
        tl.store(copy_ptr + index, master.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["block"])
def _square_sums_kernel(x_ptr, out_ptr, block, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILE], tl.float64)
    for first in range(0, block, TILE):
        column = first + tl.arange(0, TILE)
        x = tl.load(x_ptr + row * block + column, mask=column < block, other=0.0).to(tl.float64)
        total += x * x
    tl.store(out_ptr + row, tl.sum(total, axis=0))
