import pytest
import torch
from ntp_kernels.cut_scale import row_norms
from ntp_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_with_norms, swiglu_with_norms


@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float32, 2e-6)])
def test_forward_and_backward_follow_the_float64_formula(draw, width, dtype, tolerance):
    gate_up, dy = draw(5, 3, 2, width, dtype=dtype), draw(5, 3, width, dtype=dtype)
    wide = gate_up.double().requires_grad_()
    expected = torch.nn.functional.silu(wide[:, :, 0]) * wide[:, :, 1]
    expected.backward(dy.double())
    torch.testing.assert_close(swiglu(gate_up).double(), expected.detach(), rtol=tolerance, atol=tolerance)
    assert wide.grad is not None
    gradient = swiglu_backward(dy, gate_up)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=tolerance, atol=tolerance)


def test_bits_do_not_depend_on_tokens_or_units_in_the_call(draw):
    gate_up, dy = draw(7, 4, 2, 32), draw(7, 4, 32)
    y, gradient = swiglu(gate_up), swiglu_backward(dy, gate_up)
    for tokens, units in ((slice(0, 1), slice(1, 4)), (slice(2, 7), slice(0, 1))):
        part = gate_up[tokens, units].contiguous()
        assert torch.equal(y[tokens, units], swiglu(part))
        assert torch.equal(gradient[tokens, units], swiglu_backward(dy[tokens, units].contiguous(), part))


def test_padded_columns_stay_zero(draw):
    gate_up, dy = draw(3, 1, 2, 16), draw(3, 1, 16)
    gate_up[..., 12:] = 0
    dy[..., 12:] = 0
    assert not swiglu(gate_up)[..., 12:].any()
    assert not swiglu_backward(dy, gate_up)[..., 12:].any()


def test_huge_gates_saturate_without_nan(device):
    gate_up = (
        torch.tensor([3e38, -3e38, 100.0, -100.0] * 4, device=device).view(1, 1, 1, 16).expand(1, 1, 2, 16)
    )
    gate_up = gate_up.clone()
    gate_up[:, :, 1] = 1
    assert swiglu(gate_up).isfinite().all()
    assert swiglu_backward(torch.ones(1, 1, 16, device=device), gate_up).isfinite().all()


@pytest.mark.parametrize("width", [16, 32, 48, 64, 128, 1024])  # some take them in a launch of their own
def test_norms_taken_on_the_way_are_those_of_the_result(draw, device, width):
    gate_up, dy = draw(7, 3, 2, width), draw(7, 3, width)
    gate_up[1, 2, 0, 5], gate_up[2], gate_up[3] = float("nan"), 0, gate_up[3] * 1e-30
    (y, norms), (dgate_up, dnorms) = swiglu_with_norms(gate_up), swiglu_backward_with_norms(dy, gate_up)
    assert torch.equal(y[3:], swiglu(gate_up)[3:])
    assert torch.equal(dgate_up[3:], swiglu_backward(dy, gate_up)[3:])
    for mine, result in ((norms, y), (dnorms, dgate_up.flatten(2))):
        assert mine[2, 1].isnan()
        assert mine.isnan().sum() == 1
        if device.type == "cuda":
            torch.testing.assert_close(mine, row_norms(result), rtol=0, atol=0, equal_nan=True)
        else:  # the interpreter adds by numpy, which cuts a sum as it likes
            torch.testing.assert_close(mine, row_norms(result), rtol=3e-7, atol=0, equal_nan=True)
