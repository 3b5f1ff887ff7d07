import pytest
import torch
from ntp_kernels.norm import (
    TOKEN_BLOCK,
    add_rms_norm,
    fold_token_blocks,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_blocks,
)

EPS = 1e-5


def oracle(x, weight):
    """RMSNorm in float64, differentiable."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize("hidden", [64, 96])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float32, 3e-6)])
def test_forward_and_backward_follow_the_float64_formula(draw, rounded, hidden, dtype, tolerance):
    x, dy, residual = (draw(37, hidden, dtype=dtype) for _ in range(3))
    weight = draw(hidden, dtype=dtype)
    y, summed, rstd = add_rms_norm(x, residual, weight, EPS)
    dx, dweight = rms_norm_backward(dy, summed, weight, rstd, residual)
    assert torch.equal(summed, rounded(x.float() + residual.float(), dtype))
    wide, wide_weight = summed.double().requires_grad_(), weight.double().requires_grad_()
    expected = oracle(wide, wide_weight)
    expected.backward(dy.double())
    assert wide.grad is not None
    torch.testing.assert_close(y.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dx.double(), wide.grad + residual.double(), rtol=tolerance, atol=2 * tolerance)
    torch.testing.assert_close(dweight.double(), wide_weight.grad, rtol=1e-4, atol=1e-4)


def test_rows_keep_their_bits_in_any_slice(draw):
    x, dy, residual, weight = draw(40, 80), draw(40, 80), draw(40, 80), draw(80)
    y, summed, rstd = add_rms_norm(x, residual, weight, EPS)
    dx, _ = rms_norm_backward(dy, summed, weight, rstd)
    for rows in (slice(0, 1), slice(1, 8), slice(8, 40), slice(39, 40)):
        part = add_rms_norm(x[rows], residual[rows], weight, EPS)
        for whole, piece in zip((y, summed, rstd), part, strict=True):
            assert torch.equal(whole[rows], piece)
        assert torch.equal(dx[rows], rms_norm_backward(dy[rows], summed[rows], weight, rstd[rows])[0])


def test_the_plain_norm_of_the_sum_equals_the_fused_norm(draw):
    x, residual, weight = draw(9, 64), draw(9, 64), draw(64)
    y, summed, rstd = add_rms_norm(x, residual, weight, EPS)
    again, again_rstd = rms_norm(summed, weight, EPS)
    assert torch.equal(y, again)
    assert torch.equal(rstd, again_rstd)


def test_token_blocks_from_two_ranks_fold_to_the_undivided_weight_gradient(draw):
    x, dy, weight = draw(3 * TOKEN_BLOCK + 5, 64), draw(3 * TOKEN_BLOCK + 5, 64), draw(64)
    _, rstd = rms_norm(x, weight, EPS)
    _, whole = rms_norm_backward(dy, x, weight, rstd)
    cut = 2 * TOKEN_BLOCK
    parts = [
        rms_norm_backward_blocks(dy[s], x[s], weight, rstd[s])[1] for s in (slice(0, cut), slice(cut, None))
    ]
    assert torch.equal(whole, fold_token_blocks(torch.cat(parts)))


def test_a_nan_stays_in_its_row(draw):
    x, weight = draw(4, 64), draw(64)
    clean, _ = rms_norm(x, weight, EPS)
    x[2, 7] = float("nan")
    y, _ = rms_norm(x, weight, EPS)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 5120, 8192])
def test_large_rows_keep_their_bits_in_any_slice(draw, hidden):
    x, dy, weight = draw(1000, hidden), draw(1000, hidden), draw(hidden)
    y, rstd = rms_norm(x, weight, EPS)
    dx, _ = rms_norm_backward(dy, x, weight, rstd)
    for rows in (slice(0, 1), slice(1, 300), slice(300, 1000)):
        assert torch.equal(y[rows], rms_norm(x[rows], weight, EPS)[0])
        assert torch.equal(dx[rows], rms_norm_backward(dy[rows], x[rows], weight, rstd[rows])[0])
