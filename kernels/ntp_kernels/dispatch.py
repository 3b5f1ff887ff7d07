"""The public operations: CPU tensors go to the torch twins, CUDA tensors to the Triton kernels.

The kernels are imported on first use, so that a CPU machine needs no Triton. Legend and contracts: the
twins in `ntp_kernels.reference`; both sides keep the same signatures, and both keep the invariant that a
unit's bits depend on that unit alone. CPU and GPU have bits of their own.

Shapes: M tokens of one call, D hidden size, U local units, R rows of a unit, G query heads per KV head, H
head size, B width of an FFN unit, V rows of a vocabulary unit.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return y [M, U, R] = x [M, D] times w [U, R, D] transposed, plus bias [U, R]."""
    return _kernels(w, "gemm").linear(x, w, bias, out=out)


def linear_wgrad(dy: Tensor, x: Tensor, out: Tensor) -> None:
    """Add dy [M, U, R] transposed times x [M, D] to out f32 [U, R, D]."""
    _kernels(dy, "gemm").linear_wgrad(dy, x, out)


def bias_grad(dy: Tensor, out: Tensor) -> None:
    """Add the sum over tokens of dy [M, U, R] to out f32 [U, R]."""
    _kernels(dy, "gemm").bias_grad(dy, out)


def row_norms(a: Tensor) -> Tensor:
    """Return [U, M], to be gathered over ranks: norms of the rows of a [M, U, R] in every unit."""
    if _has_no_units(a):
        return a.new_empty(0, a.shape[0], dtype=torch.float32)
    return _kernels(a, "gemm").row_norms(a)


def row_scale(norms: Tensor, unit_rows: int) -> Any:
    """Return the scale of M rows, for `cut_matmul`, from the norms [total units, M]."""
    return _kernels(norms, "gemm").row_scale(norms, unit_rows)


def some_rows(scale: Any, rows: slice) -> Any:
    """Return the scale of some of the rows."""
    return scale[rows] if isinstance(scale, Tensor) else type(scale)(*(part[rows] for part in scale))


def column_scale(w: Tensor) -> Tensor:
    """Return the scale [D] of the columns of w [U, R, D], to be combined over ranks by MAX of its bits."""
    if _has_no_units(w):
        return w.new_zeros(w.shape[2], dtype=torch.float32)
    return _kernels(w, "gemm").column_scale(w)


def cut_matmul(
    a: Tensor,
    w: Tensor,
    row_scale: Any,
    column_scale: Tensor,
    total_units: int,
    first_unit: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return i32 [M, D], to be combined over ranks by SUM: the local share of a [M, U, R] times w [U, R, D].

    The scales are those of all units; `first_unit` is the global id of the first local unit.
    """
    if _has_no_units(a):
        out = a.new_empty(a.shape[0], w.shape[2], dtype=torch.int32) if out is None else out
        return out.zero_()
    options = _cut_options(a.device) if a.numel() else {}
    return _kernels(a, "gemm").cut_matmul(
        a, w, row_scale, column_scale, total_units, first_unit, out=out, **options
    )


def finish(
    total: Tensor,
    row_scale: Any,
    column_scale: Tensor,
    total_units: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return [M, D] in `dtype` of the sum over ranks of `cut_matmul`; a total [P, M, D] is summed first."""
    return _kernels(total, "gemm").finish(total, row_scale, column_scale, total_units, dtype, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `y = x * rstd * weight` [M, D] and `rstd` f32 [M]."""
    return _kernels(x, "norm").rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `y, summed, rstd`: `summed = x + residual` [M, D] in the compute dtype, then its RMSNorm."""
    return _kernels(x, "norm").add_rms_norm(x, residual, weight, eps, out)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return dx [M, D], with `residual_grad` added before the one rounding, and dweight f32 [D]."""
    return _kernels(dy, "norm").rms_norm_backward(dy, x, weight, rstd, residual_grad)


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q [M, U, G, H], k [M, U, H], v [M, U, H], rstd f32 [M, U, G+1] of qkv [M, U, G+2, H]."""
    return _kernels(qkv, "rope").qk_norm_rope(qkv, positions, cos, sin, q_weight, k_weight, eps)


def qk_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rstd: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dqkv [M, U, G+2, H] and the norm weights' gradients per unit, f32 [U, H] each (None without)."""
    rope = _kernels(dq, "rope")
    return rope.qk_norm_rope_backward(dq, dk, dv, qkv, positions, cos, sin, q_weight, k_weight, rstd)


def document_bounds(document: Tensor, seq_len: int) -> Tensor | None:
    """Return i32 [2, M], for every call of `attention` on these tokens; None where the twin needs none."""
    return _kernels(document, "attention").document_bounds(document, seq_len) if document.is_cuda else None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document: Tensor,
    seq_len: int,
    scale: float,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [M, U, G, H] and lse f32 [M, U, G]: causal inside sequences and equal `document` ids."""
    return _kernels(q, "attention").attention(q, k, v, document, seq_len, scale, bounds)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document: Tensor,
    seq_len: int,
    scale: float,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [M, U, G, H], dk and dv [M, U, H] of `attention`, from its inputs and outputs."""
    kernels = _kernels(q, "attention")
    return kernels.attention_backward(dout, q, k, v, out, lse, document, seq_len, scale, bounds)


def swiglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up` [M, U, B] of gate_up [M, U, 2, B]."""
    return _kernels(gate_up, "swiglu").swiglu(gate_up, out)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient [M, U, 2, B] of `gate_up`."""
    return _kernels(dy, "swiglu").swiglu_backward(dy, gate_up)


def swiglu_with_norms(gate_up: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what `swiglu` returns, and its `row_norms`."""
    if not _on_gpu(gate_up):
        y = swiglu(gate_up, out)
        return y, row_norms(y)
    return _kernels(gate_up, "swiglu").swiglu_with_norms(gate_up, out)


def swiglu_backward_with_norms(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `swiglu_backward` returns, and its `row_norms`, a unit having 2 B columns."""
    if not _on_gpu(gate_up):
        dgate_up = swiglu_backward(dy, gate_up)
        return dgate_up, row_norms(dgate_up.flatten(2))
    return _kernels(dy, "swiglu").swiglu_backward_with_norms(dy, gate_up)


def ce_statistics(logits: Tensor, first_unit: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return f32 [M], to be combined by MAX: the largest logit (+inf for NaN); and what `ce_sums` needs."""
    return _kernels(logits, "cross_entropy").ce_statistics(logits, first_unit, vocab_size)


def ce_sums(
    logits: Tensor, row_max: Tensor, targets: Tensor, first_unit: int, vocab_size: int, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """Return i64 [M] and i32 [M], to be combined by SUM: exponentials times 2^40, target logit bits."""
    cross_entropy = _kernels(logits, "cross_entropy")
    return cross_entropy.ce_sums(logits, row_max, targets, first_unit, vocab_size, statistics)


def ce_backward(
    logits: Tensor,
    lse: Tensor,
    targets: Tensor,
    first_unit: int,
    vocab_size: int,
    out: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return dlogits [M, U, V] of the SUM of token losses from lse f32 [M]; `out` may be `logits` itself.

    `weights` f32 [M]: of the losses in that sum.
    """
    cross_entropy = _kernels(logits, "cross_entropy")
    return cross_entropy.ce_backward(logits, lse, targets, first_unit, vocab_size, out, weights)


def embedding(ids: Tensor, w: Tensor, first_unit: int) -> Tensor:
    """Return the rows [M, D] of w [U, V, D]; +0.0 bits where the row is not local (combine bits by SUM)."""
    return _kernels(w, "embedding").embedding(ids, w, first_unit)


def embedding_wgrad(ids: Tensor, dy: Tensor, first_unit: int, out: Tensor) -> None:
    """Add dy [M, D] to the rows of out f32 [U, V, D] that ids i64 [M] name, in a fixed order per row."""
    _kernels(dy, "embedding").embedding_wgrad(ids, dy, first_unit, out)


def adamw(
    master: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    *,
    grad_scale: float = 1.0,
    copy: Tensor | None = None,
) -> None:
    """Take step number `step` (from 1) of AdamW in place on f32 [n]; `copy` receives the rounded weights."""
    _kernels(master, "adamw").adamw(
        master, m, v, grad, lr, beta1, beta2, eps, weight_decay, step, grad_scale=grad_scale, copy=copy
    )


def square_sums(x: Tensor) -> Tensor:
    """Return the sums of squares f64 [n] of rows of f32 x [n, block], in an order set by `block` alone."""
    return _kernels(x, "adamw").square_sums(x)


def fill_normal(out: Tensor, key: bytes, first: int, scale: float) -> None:
    """Fill f32 out [n] with values from `first` on of the stream of `key`; the CPU's bits on any device."""
    _kernels(out, "initial").fill_normal(out, key, first, scale)


def _kernels(tensor: Tensor, name: str) -> Any:
    """Return the module for the device of `tensor`; a call without units has no grid to launch."""
    return import_module(f"ntp_kernels.{name}" if _on_gpu(tensor) else f"ntp_kernels.reference.{name}")


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.numel() > 0


def _has_no_units(tensor: Tensor) -> bool:
    """Whether a GPU has nothing to compute here; the twins' results would have types of their own."""
    return tensor.is_cuda and tensor.numel() == 0


@cache
def _cut_options(device: torch.device) -> dict[str, str]:
    """Return which form of `cut_matmul` this device may use; the self-test takes well under a second."""
    if device.type != "cuda":
        return {}
    return {"form": import_module("ntp_kernels.selftest").cut_form(device).form}
