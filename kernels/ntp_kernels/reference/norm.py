"""RMSNorm, plain or after a residual add, for activations [M, D] that every rank of a replica holds whole.

The shape of every call is the same on every mesh, so no unit blocks are needed.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `y = x * rstd * weight` [M, D] and `rstd = (mean(x^2) + eps)^-1/2` f32 [M]."""
    x32 = x.float()
    rstd = x32.square().mean(1).add_(eps).rsqrt_()
    return (x32 * rstd.unsqueeze(1)).mul_(weight.float()).to(x.dtype), rstd


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `y, summed, rstd`: `summed = x + residual` [M, D] in the compute dtype, then its RMSNorm.

    `out`, three tensors, receives the results.
    """
    summed = x + residual
    y, rstd = rms_norm(summed, weight, eps)
    if out is None:
        return y, summed, rstd
    return out[0].copy_(y), out[1].copy_(summed), out[2].copy_(rstd)


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    residual_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `dx` [M, D] and `dweight` f32 [D]; `residual_grad` [M, D] is added to `dx` before the one
    rounding.

    For `add_rms_norm` pass `summed` as x and the gradient of `summed` as `residual_grad`.
    """
    dy32, rstd = dy.float(), rstd.unsqueeze(1)
    normed = x.float() * rstd
    dweight = (dy32 * normed).sum(0)
    scaled = dy32 * weight.float()
    dx = (scaled - normed * (scaled * normed).mean(1, keepdim=True)).mul_(rstd)
    if residual_grad is not None:
        dx += residual_grad.float()
    return dx.to(x.dtype), dweight
