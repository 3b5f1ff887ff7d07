import pytest
import torch
from ntp_kernels.rope import qk_norm_rope, qk_norm_rope_backward

EPS = 1e-6
TABLE = 40


def tables(device, size):
    angle = torch.arange(TABLE)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def oracle(qkv, positions, cos, sin, q_weight, k_weight):
    """Norm and rotate-half RoPE in float64, differentiable."""
    cos, sin = (torch.cat([t, t], -1)[positions.long()].double()[:, None, None] for t in (cos, sin))

    def one(x, weight):
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return one(qkv[:, :, :-2], q_weight), one(qkv[:, :, -2:-1], k_weight)[:, :, 0], qkv[:, :, -1]


def run(qkv, positions, cos, sin, weights, dq, dk, dv):
    q, k, v, rstd = qk_norm_rope(qkv, positions, cos, sin, *weights, EPS)
    return (q, k, v, rstd, *qk_norm_rope_backward(dq, dk, dv, qkv, positions, cos, sin, *weights, rstd))


@pytest.fixture
def case(draw, device):
    tokens, units, group, size = 37, 3, 2, 32
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    inputs = (draw(tokens, units, group + 2, size), positions, *tables(device, size))
    return inputs, (draw(tokens, units, group, size), draw(tokens, units, size), draw(tokens, units, size))


@pytest.mark.parametrize("normed", [(True, True), (False, False), (False, True), (True, False)])
def test_forward_and_backward_follow_the_float64_formula(draw, case, normed):
    inputs, gradients = case
    weights = [draw(32) if wanted else None for wanted in normed]
    q, k, v, _, dqkv, dq_weight, dk_weight = run(*inputs, weights, *gradients)
    wide = inputs[0].double().requires_grad_()
    wide_weights = [None if w is None else w.double().requires_grad_() for w in weights]
    expected = oracle(wide, *inputs[1:], *wide_weights)
    torch.autograd.backward(expected, [g.double() for g in gradients])
    for mine, theirs in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.detach(), rtol=2e-2, atol=2e-2)
    assert wide.grad is not None
    torch.testing.assert_close(dqkv.double(), wide.grad, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip((dq_weight, dk_weight), wide_weights, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine.double().sum(0), theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_unit_keeps_its_bits_whatever_units_are_in_the_call(draw, case):
    (qkv, *rest), gradients = case
    weights = [draw(32), draw(32)]
    whole = run(qkv, *rest, weights, *gradients)
    for units in (slice(0, 1), slice(1, 3)):
        part = run(qkv[:, units].contiguous(), *rest, weights, *(g[:, units].contiguous() for g in gradients))
        for a, b in zip(whole[:5], part[:5], strict=True):
            assert torch.equal(a[:, units], b)
        for a, b in zip(whole[5:], part[5:], strict=True):
            assert torch.equal(a[units], b)


def test_tokens_keep_their_bits_in_any_slice(draw, case):
    (qkv, positions, cos, sin), gradients = case
    weights = [draw(32), draw(32)]
    whole = run(qkv, positions, cos, sin, weights, *gradients)
    for rows in (slice(0, 1), slice(1, 20), slice(20, 37)):
        part = run(qkv[rows], positions[rows], cos, sin, weights, *(g[rows] for g in gradients))
        assert all(torch.equal(a[rows], b) for a, b in zip(whole[:5], part[:5], strict=True))
