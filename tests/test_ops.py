"""Operations over simulated ranks that the model cannot show: bits that arithmetic would lose."""

import pytest
import torch
from torch import Tensor

from ntp import ops
from ntp.collectives import Group
from ntp.units import spread
from ntp.weight import Weight
from tests.ranks import on_ranks

UNITS, ROWS, HIDDEN = 5, 16, 32


def shard(name: str, units: Tensor, group: Group) -> Weight:
    held = spread(len(units), group.size)[group.rank]
    return Weight(name, units[held.start : held.stop].clone(), len(units), held.start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_the_embedding_over_ranks_keeps_every_bit_of_the_table(degree: int, dtype: torch.dtype):
    table = torch.randn(UNITS, ROWS, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    table[2, 3], table[4, 0, :4] = -0.0, torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40])
    ids = torch.arange(UNITS * ROWS).flip(0)
    expected = table.flatten(0, 1)[ids].view(torch.int16)
    for hidden in on_ranks(lambda group: ops.embedding(ids, shard("table", table, group), group), degree):
        assert torch.equal(hidden.detach().view(torch.int16), expected)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_gathered_units_keep_every_bit(degree: int):
    units = torch.randn(UNITS, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    units[1, 0, 0], units[3, 1, 1], units[4] = torch.nan, -torch.inf, -0.0

    def body(group: Group) -> Tensor:
        weight = shard("units", units, group)
        return ops.gather_units(weight.data, weight, group)

    for gathered in on_ranks(body, degree):
        assert torch.equal(gathered.view(torch.int32), units.view(torch.int32))


def test_an_upstream_gradient_scales_the_gradient_of_the_logits():
    (group,) = on_ranks(lambda group: group, 1)
    head = Weight("head", torch.zeros(UNITS, ROWS, HIDDEN), UNITS)
    logits = torch.randn(6, UNITS, ROWS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets, factors = torch.arange(6), torch.arange(6.0).double()
    wide = logits.detach().double().flatten(1).requires_grad_()
    losses = ops.token_losses(logits, targets, head, UNITS * ROWS, group)
    (losses * factors).sum().backward()
    expected = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
    (expected * factors).sum().backward()
    assert logits.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad.double().flatten(1), wide.grad, rtol=1e-5, atol=1e-6)


def test_a_feed_forward_layer_that_recomputes_keeps_neither_norm_nor_swiglu():
    (group,) = on_ranks(lambda group: group, 1)
    tokens, width = 6, 16
    norm = Weight("norm", torch.ones(HIDDEN))
    gate_up = Weight("gate_up", torch.randn(UNITS, 2 * width, HIDDEN), UNITS)
    down = Weight("down", torch.randn(UNITS, width, HIDDEN), UNITS)
    down.column_scale = ops.column_scale(down)
    x, residual = (torch.randn(tokens, HIDDEN).requires_grad_() for _ in range(2))

    def kept(recompute):
        elements = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: elements.append(t.numel()) or t, lambda t: t):
            ops.feed_forward(x, residual, norm, gate_up, down, 1e-5, group, recompute)
        return sum(elements)

    assert kept(False) - kept(True) == tokens * (HIDDEN + UNITS * width)
