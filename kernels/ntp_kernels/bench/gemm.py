"""`linear` and `linear_wgrad` against cuBLAS, at every local shape of the two models."""

import torch

from .. import gemm
from .rows import Row, interleaved, relative_error
from .shapes import TOKENS, Weight, weights

_CHECKED_ROWS = 32


def sections() -> list[Row]:
    """Forward and weight gradient of every distinct local shape, the largest model first."""
    distinct = {(weight.size, weight.hidden): weight for weight in reversed(weights())}
    return [row for weight in reversed(distinct.values()) for row in (_linear(weight), _wgrad(weight))]


def _linear(weight: Weight) -> Row:
    """Column-parallel forward, row-parallel dgrad."""
    x = torch.randn(TOKENS, weight.hidden, device="cuda").bfloat16()
    w = (torch.randn(weight.units, weight.rows, weight.hidden, device="cuda") * 0.02).bfloat16()
    flat = w.flatten(0, 1)
    y = x.new_empty(TOKENS, weight.size)
    ours, base = interleaved([lambda: gemm.linear(x, w), lambda: torch.mm(x, flat.T, out=y)], graphs=True)
    exact = x[:_CHECKED_ROWS].double() @ flat.double().T
    error = relative_error(gemm.linear(x, w)[:_CHECKED_ROWS].flatten(1), exact)
    rounded = relative_error(exact.bfloat16(), exact)
    return Row(
        "linear", weight.name, _shape(weight.size, weight.hidden), ours, base, "cuBLAS bf16 out",
        2 * TOKENS * weight.size * weight.hidden, "flop", error / rounded, "over that of correct rounding",
    )  # fmt: skip


def _wgrad(weight: Weight) -> Row:
    dy = torch.randn(TOKENS, weight.units, weight.rows, device="cuda").bfloat16()
    x = torch.randn(TOKENS, weight.hidden, device="cuda").bfloat16()
    out = torch.zeros(weight.units, weight.rows, weight.hidden, device="cuda")
    flat, target = dy.flatten(1), torch.zeros(weight.size, weight.hidden, device="cuda")

    def base() -> None:
        torch.addmm(target, flat.T, x, out_dtype=torch.float32, out=target)

    ours, stock = interleaved([lambda: gemm.linear_wgrad(dy, x, out), base], graphs=True)
    out.zero_()
    gemm.linear_wgrad(dy, x, out)
    exact = flat[:, :_CHECKED_ROWS].double().T @ x.double()
    error = relative_error(out.flatten(0, 1)[:_CHECKED_ROWS], exact)
    return Row(
        "wgrad", weight.name, _shape(weight.size, weight.hidden), ours, stock,
        "cuBLAS, fp32 accumulated in place", 2 * TOKENS * weight.size * weight.hidden, "flop", error,
        "relative to float64",
    )  # fmt: skip


def _shape(size: int, hidden: int) -> str:
    return f"{TOKENS} tokens, {size}x{hidden}"
