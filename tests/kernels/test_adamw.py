import torch
from ntp_kernels.adamw import adamw, square_sums

SETTINGS = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def start(draw, count):
    master, m, grad = (draw(count, dtype=torch.float32) for _ in range(3))
    return [master, m, draw(count, dtype=torch.float32).square(), grad]


def test_three_steps_follow_torch_in_float64(draw, rounded):
    count = 2000
    parameter = torch.nn.Parameter(draw(count, dtype=torch.float32).double())
    optimizer = torch.optim.AdamW(
        [parameter], lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False, fused=False
    )
    master = parameter.detach().float()
    m, v, copy = (
        torch.zeros_like(master),
        torch.zeros_like(master),
        torch.empty_like(master, dtype=torch.bfloat16),
    )
    for step in (1, 2, 3):
        grad = draw(count, dtype=torch.float32)
        parameter.grad = grad.double() * 0.25
        optimizer.step()
        adamw(master, m, v, grad, **SETTINGS, step=step, grad_scale=0.25, copy=copy)
    torch.testing.assert_close(master.double(), parameter.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(copy, rounded(master, torch.bfloat16))


def test_bits_do_not_depend_on_where_a_buffer_is_cut(draw):
    whole = start(draw, 1500)
    parts = [[t[s].clone() for t in whole] for s in (slice(0, 17), slice(17, 1040), slice(1040, 1500))]
    adamw(*whole, **SETTINGS, step=5)
    for part in parts:
        adamw(*part, **SETTINGS, step=5)
    for index, tensor in enumerate(whole):
        assert torch.equal(tensor, torch.cat([part[index] for part in parts]))


def test_an_unaligned_view_gives_the_same_bits(draw):
    whole = start(draw, 1100)
    views = [torch.empty(1103, device=t.device)[3:].copy_(t) for t in whole]
    adamw(*whole, **SETTINGS, step=2)
    adamw(*views, **SETTINGS, step=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, views, strict=True))


def test_zero_gradient_and_moments_keep_zero_weights_zero(device):
    buffers = [torch.zeros(64, device=device) for _ in range(4)]
    adamw(*buffers, **SETTINGS, step=1)
    assert not buffers[0].any()


def test_square_sums_follow_float64_and_do_not_depend_on_neighbours(draw):
    x = draw(6, 2500, dtype=torch.float32)
    sums = square_sums(x)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, x.double().square().sum(1), rtol=1e-14, atol=0)
    assert torch.equal(sums[3:5], square_sums(x[3:5]))
    assert square_sums(x[:0]).shape == (0,)
    x[1, 5] = float("nan")
    assert square_sums(x).isnan().tolist() == [False, True, False, False, False, False]
