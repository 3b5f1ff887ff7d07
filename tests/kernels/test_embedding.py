import pytest
import torch
from ntp_kernels import embedding as module
from ntp_kernels.embedding import embedding, embedding_wgrad


def test_lookup_copies_owned_rows_bit_for_bit_and_leaves_positive_zeros(draw, device):
    w = draw(4, 16, 48)
    w[2, 3] = -0.0
    ids = torch.tensor([0, 35, 63, 16, 35, 31], device=device)
    whole = embedding(ids, w, 0)
    assert torch.equal(whole.view(torch.int16), w.view(64, 48)[ids].view(torch.int16))
    halves = [embedding(ids, w[:1], 0), embedding(ids, w[1:], 1)]
    combined = halves[0].view(torch.int16) + halves[1].view(torch.int16)
    assert torch.equal(whole.view(torch.int16), combined)


@pytest.mark.parametrize("hidden", [32, 48])
def test_gradient_follows_float64_and_is_added_to_the_buffer(draw, device, hidden):
    ids = torch.tensor([5, 40, 5, 5, 17, 63, *([9] * 21)], device=device)
    dy, out = draw(len(ids), hidden), draw(4, 16, hidden, dtype=torch.float32)
    expected = out.double().view(64, hidden).index_add(0, ids, dy.double())
    embedding_wgrad(ids, dy, 0, out)
    torch.testing.assert_close(out.double().view(64, hidden), expected, rtol=1e-6, atol=1e-6)


def test_a_rows_gradient_depends_on_its_own_tokens_only(draw, device):
    ids = torch.tensor([5, 40, 5, 5, 17, 63, *([9, 41] * 21)], device=device)
    dy = draw(len(ids), 32)
    whole = torch.zeros(4, 16, 32, device=device)
    embedding_wgrad(ids, dy, 0, whole)
    first, rest = torch.zeros(1, 16, 32, device=device), torch.zeros(3, 16, 32, device=device)
    embedding_wgrad(ids, dy, 0, first)
    embedding_wgrad(ids, dy, 1, rest)
    assert torch.equal(whole, torch.cat([first, rest]))
    only_nine = torch.zeros(4, 16, 32, device=device)
    embedding_wgrad(ids[ids == 9], dy[ids == 9], 0, only_nine)
    assert torch.equal(whole[0, 9], only_nine[0, 9])


def test_counting_sorts_as_a_stable_sort_does(device, monkeypatch):
    ids = torch.randint(0, 50, (1500,), generator=torch.Generator().manual_seed(4)).to(device)
    counted = module._sorted(ids)
    monkeypatch.setattr(module, "_COUNTED", 0)
    expected = torch.sort(ids, stable=True)
    for names, order in (counted, module._sorted(ids)):
        assert torch.equal(names.long(), expected.values)
        assert torch.equal(order.long(), expected.indices)
