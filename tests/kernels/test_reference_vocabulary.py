"""The twins of cross entropy, embedding and AdamW: against float64 and torch, and shard-independent bits."""

from itertools import pairwise

import pytest
import torch
from ntp_kernels import dispatch as kernels
from torch import Tensor

M, U, V, D, VOCABULARY = 24, 5, 16, 32, 75
CUTS = [(0, 5), (0, 1, 1, 5), (0, 2, 5), (0, 4, 5), (0, 1, 2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(cut: tuple[int, ...]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(cut)]


def tokens() -> Tensor:
    ids = torch.randint(VOCABULARY, (M,), generator=torch.Generator().manual_seed(5))
    ids[:4] = torch.tensor([0, VOCABULARY - 1, 16, 16])
    return ids


def cross_entropy(
    logits: Tensor, targets: Tensor, cut: tuple[int, ...] = (0, U)
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses f64 [M], lse f32 [M] and dlogits as ranks that hold the parts of `cut` compute them."""
    shards = [(logits[:, part].contiguous(), part.start) for part in parts(cut)]
    local = [kernels.ce_statistics(shard, first, VOCABULARY) for shard, first in shards]
    row_max = torch.stack([top for top, _ in local]).amax(0)
    sums, bits = torch.zeros(M, dtype=torch.int64), torch.zeros(M, dtype=torch.int32)
    for (shard, first), (_, statistics) in zip(shards, local, strict=True):
        some_sums, some_bits = kernels.ce_sums(shard, row_max, targets, first, VOCABULARY, statistics)
        sums, bits = sums + some_sums, bits + some_bits
    lse = row_max.double() + (sums.double() * 2.0**-40).log()
    grads = [kernels.ce_backward(shard, lse.float(), targets, first, VOCABULARY) for shard, first in shards]
    return lse - bits.view(torch.float32).double(), lse.float(), torch.cat(grads, 1)


def test_cross_entropy_agrees_with_float64():
    logits, targets = 4 * gaussian(M, U, V), tokens()
    targets[6] = -100
    losses, _, dlogits = cross_entropy(logits, targets)
    wide = logits.double().flatten(1)[:, :VOCABULARY].requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
    expected.sum().backward()
    assert wide.grad is not None
    scored = targets >= 0
    torch.testing.assert_close(losses[scored], expected[scored].detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dlogits.flatten(1)[:, :VOCABULARY].double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS[1:])
def test_cross_entropy_has_the_same_bits_for_any_shards(cut: tuple[int, ...], dtype: torch.dtype):
    logits, targets = 4 * gaussian(M, U, V, dtype=dtype), tokens()
    untouched = logits.clone()
    for ours, whole in zip(cross_entropy(logits, targets, cut), cross_entropy(logits, targets), strict=True):
        assert torch.equal(ours, whole)
    assert torch.equal(logits, untouched)


def test_padded_columns_and_ignored_rows_get_exactly_zero():
    logits, targets = gaussian(M, U, V), tokens()
    logits.flatten(1)[:, VOCABULARY:] = 50
    targets[3] = -100
    losses, _, dlogits = cross_entropy(logits, targets)
    assert (losses < 20).all()
    assert (dlogits.flatten(1)[:, VOCABULARY:] == 0).all()
    assert (dlogits[3] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_logit_makes_its_row_nan_on_every_shard_and_no_other(bad: float):
    logits, targets = gaussian(M, U, V), tokens()
    logits[2, 3, 4] = bad
    losses, _, dlogits = cross_entropy(logits, targets, (0, 1, 5))
    row = torch.arange(M) == 2
    assert torch.equal(losses.isnan(), row)
    assert torch.equal(dlogits.flatten(1)[:, :VOCABULARY].isnan().all(1), row)


def test_a_shard_of_minus_infinities_has_probability_zero():
    logits, targets = gaussian(M, U, V), torch.zeros(M, dtype=torch.int64)
    logits[:, 2] = -torch.inf
    losses, _, dlogits = cross_entropy(logits, targets)
    assert losses.isfinite().all()
    assert (dlogits[:, 2] == 0).all()


def test_the_gradient_may_overwrite_the_logits():
    logits, targets = gaussian(M, U, V), tokens()
    _, lse, expected = cross_entropy(logits, targets)
    assert kernels.ce_backward(logits, lse, targets, 0, VOCABULARY, out=logits) is logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS)
def test_the_embedding_selects_bits_and_minus_zero_survives(cut: tuple[int, ...], dtype: torch.dtype):
    ids, table = tokens(), gaussian(U, V, D, dtype=dtype)
    table[1, 0] = -0.0
    bits = torch.zeros(M, D * table.element_size() // 4, dtype=torch.int32)
    for part in parts(cut):
        bits += kernels.embedding(ids, table[part].contiguous(), part.start).view(torch.int32)
    assert torch.equal(bits, table.flatten(0, 1)[ids].view(torch.int32))


@pytest.mark.parametrize("cut", CUTS)
def test_the_embedding_gradient_adds_tokens_in_order(cut: tuple[int, ...]):
    ids, dy = tokens() % 7 * 9, gaussian(M, D)
    expected = torch.full((U * V, D), 0.5)
    for token, row in enumerate(ids.tolist()):
        expected[row] += dy[token]
    out = torch.full((U, V, D), 0.5)
    for part in parts(cut):
        kernels.embedding_wgrad(ids, dy, part.start, out[part])
    assert torch.equal(out.flatten(0, 1), expected)


def adamw_steps(master: Tensor, grads: list[Tensor], **options: float) -> tuple[Tensor, Tensor, Tensor]:
    state = master.clone(), torch.zeros_like(master), torch.zeros_like(master)
    for step, grad in enumerate(grads, 1):
        kernels.adamw(*state, grad, 1e-2, 0.9, 0.95, 1e-8, 0.1, step, **options)
    return state


def test_adamw_has_the_bits_of_torch():
    master, grads = gaussian(1000), [gaussian(1000, seed=seed) for seed in range(1, 5)]
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False, fused=False
    )
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
    assert torch.equal(adamw_steps(master, grads)[0], parameter.detach())


@pytest.mark.parametrize("start", [0, 1, 13, 333])
@pytest.mark.parametrize("length", [1, 5, 31, 64, 500])
def test_adamw_has_the_same_bits_for_any_slice(start: int, length: int):
    master, grads = gaussian(1000), [gaussian(1000, seed=seed) for seed in range(1, 4)]
    cut = slice(start, start + length)
    whole = adamw_steps(master, grads, grad_scale=0.37)
    for some, everything in zip(
        adamw_steps(master[cut], [grad[cut] for grad in grads], grad_scale=0.37), whole, strict=True
    ):
        assert torch.equal(some, everything[cut])


def test_adamw_writes_the_rounded_copy():
    state, copy = (gaussian(64), torch.zeros(64), torch.zeros(64)), torch.empty(64, dtype=torch.bfloat16)
    kernels.adamw(*state, gaussian(64, seed=1), 1e-2, 0.9, 0.95, 1e-8, 0.1, 1, copy=copy)
    assert torch.equal(copy, state[0].bfloat16())


@pytest.mark.parametrize("block", [1, 3, 16, 100, 4096])
def test_square_sums_agree_with_float64_and_do_not_depend_on_other_rows(block: int):
    x = gaussian(9, block)
    sums = kernels.square_sums(x)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, x.double().square().sum(1), rtol=1e-12, atol=0)
    assert torch.equal(kernels.square_sums(x[4:6].contiguous()), sums[4:6])
