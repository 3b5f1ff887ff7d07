import itertools
import math

import pytest
import torch
from ntp_kernels.cross_entropy import GRID_BITS, IGNORED, ce_backward, ce_statistics, ce_sums

VOCAB = 75  # of 5 units of 16: the last unit has five padded columns
UNITS, WIDTH = 5, 16


def combine(logits, targets, cuts):
    """Run the passes over the shards that `cuts` makes and combine them as ranks do."""
    edges = [0, *cuts, UNITS]
    shards = [(a, logits[:, a:b].contiguous()) for a, b in itertools.pairwise(edges)]
    local = [ce_statistics(shard, first, VOCAB) for first, shard in shards]
    row_max = torch.stack([top for top, _ in local]).amax(0)
    pieces = [
        ce_sums(shard, row_max, targets, first, VOCAB, statistics)
        for (first, shard), (_, statistics) in zip(shards, local, strict=True)
    ]
    total, bits = sum(p[0] for p in pieces), sum(p[1] for p in pieces)
    lse = row_max + torch.log(total.double() * 2.0**-GRID_BITS).float()
    gradient = torch.cat([ce_backward(shard, lse, targets, first, VOCAB) for first, shard in shards], 1)
    return row_max, total, bits, lse, gradient


@pytest.fixture
def case(draw, device):
    logits = draw(6, UNITS, WIDTH) * 4
    targets = torch.tensor([0, 74, 33, IGNORED, 16, 15], device=device)
    return logits, targets


def test_loss_and_gradient_follow_float64(case):
    logits, targets = case
    row_max, _, bits, lse, gradient = combine(logits, targets, [])
    flat = logits.view(6, -1)[:, :VOCAB].double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(flat, targets, reduction="sum")
    loss.backward()
    assert flat.grad is not None
    assert torch.equal(row_max, flat.detach().float().amax(1))
    torch.testing.assert_close(lse.double(), flat.detach().logsumexp(1), rtol=1e-6, atol=1e-6)
    kept = targets != IGNORED
    mine = (lse - bits.view(torch.float32))[kept].double().sum()
    torch.testing.assert_close(mine, loss.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient.view(6, -1)[:, :VOCAB].double(), flat.grad, rtol=8e-3, atol=1e-6)
    assert not gradient.view(6, -1)[:, VOCAB:].any()
    assert not gradient[3].any()


@pytest.mark.parametrize("cuts", [[1], [4], [2, 3], [1, 2, 3, 4]])
def test_any_cut_of_the_vocabulary_gives_the_same_bits(case, cuts):
    logits, targets = case
    for whole, cut in zip(combine(logits, targets, []), combine(logits, targets, cuts), strict=True):
        assert torch.equal(whole, cut)


def test_rows_keep_their_bits_in_any_slice(case):
    logits, targets = case
    whole = combine(logits, targets, [2])
    part = combine(logits[1:4], targets[1:4], [2])
    assert all(torch.equal(a[1:4], b) for a, b in zip(whole, part, strict=True))


def test_the_gradient_may_overwrite_the_logits(case):
    logits, targets = case
    lse = logits.float().flatten(1).logsumexp(1)
    fresh = ce_backward(logits, lse, targets, 0, VOCAB)
    assert torch.equal(fresh, ce_backward(logits, lse, targets, 0, VOCAB, out=logits))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_nan_or_infinity_poisons_its_row_on_every_rank(case, poison):
    logits, targets = case
    clean = combine(logits, targets, [2])
    logits[1, 4, 2] = poison
    row_max, total, _, lse, gradient = combine(logits, targets, [2])
    assert row_max[1] == math.inf
    assert total[1] == 0
    assert lse[1].isnan()
    assert gradient[1].flatten()[:VOCAB].isnan().all()
    others = [0, 2, 3, 4, 5]
    assert torch.equal(gradient[others], clean[4][others])


def test_a_unit_without_real_columns_adds_nothing(case):
    logits, targets = case
    row_max, statistics = ce_statistics(logits, 0, 40)
    assert statistics[:, 3:, 1].eq(0).all()
    total, _ = ce_sums(logits, row_max, targets.clamp(max=39), 0, 40, statistics)
    exact = (logits.flatten(1)[:, :40].double() - row_max[:, None].double()).exp().sum(1)
    torch.testing.assert_close(total.double() * 2.0**-GRID_BITS, exact, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_a_real_vocabulary_in_uneven_shards_gives_the_same_bits(draw, device):
    logits = draw(64, 64, 2016)
    targets = torch.randint(0, 128256, (64,), device=device)
    row_max, statistics = ce_statistics(logits, 0, 128256)
    total, bits = ce_sums(logits, row_max, targets, 0, 128256, statistics)
    pieces = []
    for a, b in ((0, 9), (9, 40), (40, 64)):
        shard = logits[:, a:b].contiguous()
        local = ce_statistics(shard, a, 128256)[1]
        assert torch.equal(local, statistics[:, a:b])
        pieces.append(ce_sums(shard, row_max, targets, a, 128256, local))
    assert torch.equal(total, sum(p[0] for p in pieces))
    assert torch.equal(bits, sum(p[1] for p in pieces))
