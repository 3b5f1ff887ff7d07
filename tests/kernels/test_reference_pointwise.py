"""The twins of norms, RoPE, attention and SwiGLU: against float64 autograd, and unit-independent bits."""

from itertools import pairwise

import pytest
import torch
from ntp_kernels import dispatch as kernels
from torch import Tensor

SEQ_LEN, SEQUENCES, U, G, H, B = 12, 2, 5, 2, 16, 32
M, EPS, D = SEQ_LEN * SEQUENCES, 1e-5, 48
CUTS = [(0, 1, 1, 5), (0, 2, 5), (0, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(cut: tuple[int, ...]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(cut)]


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours.double(), expected.detach(), rtol=1e-5, atol=2e-5)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def test_rms_norm_after_a_residual_add_agrees_with_float64():
    x, residual, weight, dy, dsummed = (gaussian(M, D, seed=s) for s in range(5))
    weight = weight[0].contiguous()
    y, summed, rstd = kernels.add_rms_norm(x, residual, weight, EPS)
    dx, dweight = kernels.rms_norm_backward(dy, summed, weight, rstd, dsummed)
    x64, residual64, weight64 = wide(x, residual, weight)
    y64 = rms(x64 + residual64, weight64)
    ((y64 * dy).sum() + ((x64 + residual64) * dsummed).sum()).backward()
    assert x64.grad is not None
    assert weight64.grad is not None
    close(y, y64)
    close(summed, x64 + residual64)
    close(dx, x64.grad)
    close(dweight, weight64.grad)


def test_a_plain_rms_norm_is_the_norm_of_the_sum():
    x, residual, weight = gaussian(M, D), gaussian(M, D, seed=1), gaussian(D, seed=2)
    y, summed, rstd = kernels.add_rms_norm(x, residual, weight, EPS)
    plain, plain_rstd = kernels.rms_norm(summed, weight, EPS)
    assert torch.equal(y, plain)
    assert torch.equal(rstd, plain_rstd)


def rope_inputs(dtype: torch.dtype, norm: bool) -> tuple[Tensor, ...]:
    angles = torch.arange(SEQ_LEN)[:, None] * torch.linspace(0.05, 1, H // 2)
    weights = (1 + 0.3 * gaussian(2, H, seed=9)).to(dtype) if norm else (None, None)
    positions = (torch.arange(M) % SEQ_LEN).int()
    return gaussian(M, U, G + 2, H, dtype=dtype), positions, angles.cos(), angles.sin(), *weights


@pytest.mark.parametrize("norm", [False, True])
def test_qk_norm_and_rope_agree_with_float64(norm: bool):
    qkv, positions, cos, sin, q_weight, k_weight = rope_inputs(torch.float32, norm)
    q, k, v, rstd = kernels.qk_norm_rope(qkv, positions, cos, sin, q_weight, k_weight, EPS)
    dq, dk, dv = gaussian(*q.shape, seed=1), gaussian(*k.shape, seed=2), gaussian(*v.shape, seed=3)
    dqkv, dq_weight, dk_weight = kernels.qk_norm_rope_backward(
        dq, dk, dv, qkv, positions, cos, sin, q_weight, k_weight, rstd
    )
    (qkv64,) = wide(qkv)
    one = torch.ones(U, H)
    per_unit = [one if weight is None else one * weight for weight in (q_weight, k_weight)]
    q_weight64, k_weight64 = wide(*per_unit)
    c, s = cos[positions].double()[:, None, None], sin[positions].double()[:, None, None]

    def rotate(x: Tensor, weight: Tensor) -> Tensor:
        x = rms(x, weight[:, None]) if norm else x
        low, high = x[..., : H // 2], x[..., H // 2 :]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    q64, k64 = rotate(qkv64[:, :, :G], q_weight64), rotate(qkv64[:, :, G : G + 1], k_weight64)[:, :, 0]
    ((q64 * dq).sum() + (k64 * dk).sum() + (qkv64[:, :, -1] * dv).sum()).backward()
    assert qkv64.grad is not None
    close(q, q64)
    close(k, k64)
    assert torch.equal(v, qkv[:, :, -1])
    close(dqkv, qkv64.grad)
    if not norm:
        assert dq_weight is None
        assert dk_weight is None
        return
    assert dq_weight is not None
    assert dk_weight is not None
    assert q_weight64.grad is not None
    assert k_weight64.grad is not None
    close(dq_weight, q_weight64.grad)
    close(dk_weight, k_weight64.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_qk_norm_and_rope_have_the_same_bits_for_any_units(
    cut: tuple[int, ...], norm: bool, dtype: torch.dtype
):
    qkv, *rest = rope_inputs(dtype, norm)
    untouched = qkv.clone()

    def both(qkv: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, rstd = kernels.qk_norm_rope(qkv, *rest, EPS)
        dqkv, *weights = kernels.qk_norm_rope_backward(q, k, v, qkv, *rest, rstd)
        return [q, k, v, rstd, dqkv], [weight for weight in weights if weight is not None]

    activations, weights = both(qkv)
    for part in parts(cut):
        some_activations, some_weights = both(qkv[:, part].contiguous())
        for some, all_units in zip(some_activations, activations, strict=True):
            assert torch.equal(some, all_units[:, part])
        for some, all_units in zip(some_weights, weights, strict=True):
            assert torch.equal(some, all_units[part])
    assert torch.equal(qkv, untouched)


def attention_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, dout = gaussian(M, U, G, H, dtype=dtype), gaussian(M, U, G, H, dtype=dtype, seed=1)
    k, v = gaussian(M, U, H, dtype=dtype, seed=2), gaussian(M, U, H, dtype=dtype, seed=3)
    return q, k, v, dout, torch.tensor([0] * 5 + [1] * 7 + [2] * 12, dtype=torch.int32)


def test_attention_agrees_with_float64_and_stays_in_its_document():
    q, k, v, dout, document = attention_inputs(torch.float32)
    out, lse = kernels.attention(q, k, v, document, SEQ_LEN, 0.3)
    grads = kernels.attention_backward(dout, q, k, v, out, lse, document, SEQ_LEN, 0.3)
    q64, k64, v64 = wide(q, k, v)
    scores = 0.3 * torch.einsum("mugh,nuh->mugn", q64, k64)
    order = torch.arange(M)
    seen = (order[:, None] >= order[None, :]) & (document[:, None] == document[None, :])
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    out64 = torch.einsum("mugn,nuh->mugh", scores.softmax(-1), v64)
    (out64 * dout).sum().backward()
    close(out, out64)
    close(lse, scores.logsumexp(-1))
    for ours, leaf in zip(grads, (q64, k64, v64), strict=True):
        assert leaf.grad is not None
        close(ours, leaf.grad)


def test_attention_never_crosses_a_sequence_even_if_document_ids_repeat():
    q, k, v, _, _ = attention_inputs(torch.float32)
    out, _ = kernels.attention(q, k, v, torch.zeros(M, dtype=torch.int32), SEQ_LEN, 0.3)
    second = slice(SEQ_LEN, M)
    alone, _ = kernels.attention(
        q[second], k[second], v[second], torch.zeros(SEQ_LEN, dtype=torch.int32), SEQ_LEN, 0.3
    )
    assert torch.equal(out[second], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS)
def test_attention_has_the_same_bits_for_any_units(cut: tuple[int, ...], dtype: torch.dtype):
    *inputs, document = attention_inputs(dtype)

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        out, lse = kernels.attention(q, k, v, document, SEQ_LEN, 0.25)
        return [out, lse, *kernels.attention_backward(dout, q, k, v, out, lse, document, SEQ_LEN, 0.25)]

    everything = both(*inputs)
    for part in parts(cut):
        for some, all_units in zip(both(*(x[:, part].contiguous() for x in inputs)), everything, strict=True):
            assert torch.equal(some, all_units[:, part])


def test_swiglu_agrees_with_float64():
    gate_up, dy = gaussian(M, U, 2, B), gaussian(M, U, B, seed=1)
    (wide_gate_up,) = wide(gate_up)
    expected = torch.nn.functional.silu(wide_gate_up[:, :, 0]) * wide_gate_up[:, :, 1]
    (expected * dy).sum().backward()
    assert wide_gate_up.grad is not None
    close(kernels.swiglu(gate_up), expected)
    close(kernels.swiglu_backward(dy, gate_up), wide_gate_up.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(24, B), (7, 16), (5, 48)])
@pytest.mark.parametrize("cut", CUTS)
def test_swiglu_has_the_same_bits_for_any_units(
    cut: tuple[int, ...], tokens: int, width: int, dtype: torch.dtype
):
    """Odd numbers of tokens make one unit end in the tail of a vector loop where two units do not."""
    gate_up, dy = gaussian(tokens, U, 2, width, dtype=dtype), gaussian(tokens, U, width, dtype=dtype, seed=1)
    y, grad = kernels.swiglu(gate_up), kernels.swiglu_backward(dy, gate_up)
    for part in parts(cut):
        some = gate_up[:, part].contiguous()
        assert torch.equal(kernels.swiglu(some), y[:, part])
        assert torch.equal(kernels.swiglu_backward(dy[:, part].contiguous(), some), grad[:, part])
