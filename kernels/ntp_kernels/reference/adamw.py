"""AdamW on flat float32 buffers, and squared sums per fixed block for the gradient norm.

AdamW is elementwise and is not torch's fused kernel, whose bits depend on where a slice begins. It is the
formula of `torch.optim.AdamW(foreach=False)`, operation by operation, so that its bits are torch's.
"""

import math

import torch


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

    `grad_scale` multiplies the gradient first (clip coefficient over token count). `copy` [n] receives the
    new weights rounded to its dtype.
    """
    scaled = grad if grad_scale == 1.0 else grad * grad_scale
    master.mul_(1 - lr * weight_decay)
    m.lerp_(scaled, 1 - beta1)
    v.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    master.addcdiv_(m, denominator, value=-(lr / (1 - beta1**step)))
    if copy is not None:
        copy.copy_(master)


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of every row of f32 x [n, block] as f64 [n].

    Order: squares are exact in float64; then halves are added elementwise until one column is left, a tree
    that depends on `block` only.
    """
    total = x.double().square_()
    while (width := total.shape[1]) > 1:
        half = (width + 1) // 2
        total[:, : width - half] += total[:, half:]
        total = total[:, :half]
    return total[:, 0].clone()
