"""The GEMM twins: against float64, and bits that do not depend on which units are in a call."""

from itertools import pairwise

import pytest
import torch
from ntp_kernels import dispatch as kernels
from ntp_kernels.reference.gemm import MIN_EXPONENT, POISON, column_scale, grid_bits, row_norms, row_scale

M, D, U, R = 24, 48, 5, 16
CUTS = [(0, 1, 1, 5), (0, 1, 2, 3, 4, 5), (0, 2, 5), (0, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(cut: tuple[int, ...]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(cut)]


def row_exponents(a: torch.Tensor) -> torch.Tensor:
    return row_scale(row_norms(a), a.shape[2])


def cut_product(a: torch.Tensor, w: torch.Tensor, cut: tuple[int, ...] = (0, U)) -> torch.Tensor:
    """What ranks that hold the parts of `cut` compute together."""
    pieces = [(a[:, part].contiguous(), w[part].contiguous()) for part in parts(cut)]
    rows = row_scale(torch.cat([row_norms(piece) for piece, _ in pieces]), a.shape[2])
    columns = torch.stack([column_scale(unit) for _, unit in pieces]).amax(0)
    totals = [kernels.cut_matmul(piece, unit, rows, columns, w.shape[0]) for piece, unit in pieces]
    total = torch.stack(totals).sum(0, dtype=torch.int32)
    return kernels.finish(total, rows, columns, w.shape[0], a.dtype)


def exact(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("mur,urd->md", a.double(), w.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "rows"), [(M, D, R), (24, 1024, 64), (1024, 512, 64)])
@pytest.mark.parametrize("cut", CUTS[:2])
def test_whole_contractions_have_the_same_bits_for_any_units(
    cut: tuple[int, ...], tokens: int, hidden: int, rows: int, dtype: torch.dtype
):
    """At the two larger shapes one GEMM over several units has other bits, forward and weight gradient."""
    x = gaussian(tokens, hidden, dtype=dtype)
    w, bias = gaussian(U, rows, hidden, dtype=dtype), gaussian(U, rows, dtype=dtype)
    y, grad, bias_grad = kernels.linear(x, w, bias), torch.ones_like(w).float(), torch.ones(U, rows)
    kernels.linear_wgrad(y, x, grad)
    kernels.bias_grad(y, bias_grad)
    for part in parts(cut):
        y_part = kernels.linear(x, w[part].contiguous(), bias[part].contiguous())
        assert torch.equal(y_part, y[:, part])
        grad_part, bias_part = torch.ones_like(grad[part]), torch.ones_like(bias_grad[part])
        kernels.linear_wgrad(y_part, x, grad_part)
        kernels.bias_grad(y_part, bias_part)
        assert torch.equal(grad_part, grad[part])
        assert torch.equal(bias_part, bias_grad[part])


def test_whole_contractions_agree_with_float64():
    x, w, bias, dy = gaussian(M, D), gaussian(U, R, D), gaussian(U, R), gaussian(M, U, R, seed=1)
    expected = torch.einsum("md,urd->mur", x.double(), w.double()) + bias.double()
    torch.testing.assert_close(kernels.linear(x, w, bias).double(), expected, rtol=1e-5, atol=1e-5)
    out, bias_out = torch.full((U, R, D), 2.0), torch.full((U, R), 2.0)
    kernels.linear_wgrad(dy, x, out)
    kernels.bias_grad(dy, bias_out)
    expected = 2 + torch.einsum("mur,md->urd", dy.double(), x.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias_out.double(), 2 + dy.double().sum(0), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once():
    x, w, bias = (gaussian(*s, dtype=torch.bfloat16) for s in [(M, D), (U, R, D), (U, R)])
    expected = kernels.linear(x.float(), w.float(), bias.float()).bfloat16()
    assert torch.equal(kernels.linear(x, w, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_contraction_has_the_bits_of_the_uncut_one(cut: tuple[int, ...], dtype: torch.dtype):
    a, w = gaussian(M, U, R, dtype=dtype), gaussian(U, R, D, dtype=dtype, seed=1)
    a[:, 3] *= 200
    a[5, 1:] = a[6, :4] = 0
    w[2:, :, 7] = w[:3, :, 8] = 0
    a[5] /= 64
    assert torch.equal(cut_product(a, w, cut), cut_product(a, w))


@pytest.mark.parametrize("spread", [0, 10])
def test_a_cut_contraction_agrees_with_float64(spread: int):
    a, w = gaussian(M, U, R), gaussian(U, R, D, seed=1)
    a *= torch.exp2(spread * gaussian(M, 1, 1, seed=2).round())
    error = (cut_product(a, w).double() - exact(a, w)).square().mean(1).sqrt()
    assert (error < 1e-6 * exact(a, w).square().mean(1).sqrt()).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30, 3e37])
def test_rows_of_any_size_keep_their_relative_error(scale: float):
    a, w = gaussian(M, U, R), gaussian(U, R, D, seed=1) * 0.1
    a[4] *= scale
    expected, result = exact(a, w), cut_product(a, w)
    torch.testing.assert_close(result[4].double() / scale, expected[4] / scale, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result[5].double(), expected[5], rtol=1e-5, atol=1e-6)


def test_a_result_beyond_float32_is_infinite_not_garbage():
    a, w = gaussian(M, U, R).abs() * 1e30, gaussian(U, R, D, seed=1).abs() * 1e30
    assert cut_product(a, w).isposinf().all()


def test_subnormal_rows_give_small_numbers_not_garbage():
    a, w = torch.full((M, U, R), 1e-42), torch.ones(U, R, D)
    torch.testing.assert_close(cut_product(a, w).double(), exact(a, w), rtol=0, atol=1e-43)


def test_the_bound_holds_where_float32_norms_say_exactly_one():
    """Rows (1, ..., -2^-12), (-1, ..., 2^-12): without slack the product would reach the end of the grid."""
    a, w = torch.zeros(1, 1, R), torch.zeros(1, R, 1)
    a[0, 0, 0], a[0, 0, -1], w[0, 0, 0], w[0, -1, 0] = 1, -(2.0**-12), -1, 2.0**-12
    assert torch.equal(row_exponents(a), torch.tensor([1], dtype=torch.int32))
    assert torch.equal(cut_product(a, w).double(), exact(a, w).float().double())


@pytest.mark.parametrize("units", [1, 2, 3, 64, 100, 4096])
def test_the_largest_sums_fit_an_int32(units: int):
    largest = round(2 ** grid_bits(units) / 1.001**2 * (1 + 1e-3))
    assert units * largest < 2**31


def test_parallel_rows_and_columns_of_norm_almost_one_do_not_wrap():
    """Their float32 products reach 1 in all of 64 units: only the slack keeps the sum below 2^31."""
    directions = torch.nn.functional.normalize(gaussian(200, 64).double(), dim=1) * (1 - 2.0**-25)
    vectors = directions.float()
    a, w = vectors[:, None].expand(-1, 64, -1).contiguous(), vectors.t().expand(64, -1, -1).contiguous()
    torch.testing.assert_close(
        cut_product(a, w, (0, 64)).diagonal(), torch.full((200,), 64.0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_a_full_grid_does_not_wrap(sign: int):
    """Parallel rows and columns reach the bound of Cauchy-Schwarz in every unit."""
    a, w = torch.full((1, 64, R), 0.2497), torch.full((64, R, 1), 0.2497 * sign)
    torch.testing.assert_close(cut_product(a, w, (0, 1, 64)).double(), exact(a, w), rtol=1e-6, atol=0)


def test_zero_rows_and_columns_are_exact_positive_zeros():
    a, w = gaussian(M, U, R), gaussian(U, R, D, seed=1)
    a[3], w[:, :, 5] = -0.0, 0
    result = cut_product(a, w)
    assert torch.equal(result[3].view(torch.int32), torch.zeros(D, dtype=torch.int32))
    assert torch.equal(result[:, 5].contiguous().view(torch.int32), torch.zeros(M, dtype=torch.int32))
    assert row_exponents(a)[3] == MIN_EXPONENT


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_number_poisons_exactly_its_row_or_column_on_every_rank(bad: float):
    a, w = gaussian(M, U, R), gaussian(U, R, D, seed=1)
    clean = cut_product(a, w)
    a[7, 2, 3], w[4, 1, 9] = bad, bad
    result = cut_product(a, w, (0, 1, 3, 5))
    expected = torch.zeros(M, D, dtype=torch.bool)
    expected[7], expected[:, 9] = True, True
    assert torch.equal(result.isnan(), expected)
    assert torch.equal(result[~expected], clean[~expected])
    assert row_exponents(a)[7] == POISON


def test_exponents_are_the_smallest_that_bound_the_largest_unit():
    a = gaussian(M, U, R)
    norms = a.double().square().sum(2).sqrt().amax(1) * 1.001
    exponent = row_exponents(a).double()
    assert (norms < torch.exp2(exponent)).all()
    assert (norms >= torch.exp2(exponent - 1)).all()
    assert torch.equal(column_scale(a.permute(1, 2, 0).contiguous()).double(), exponent)


@pytest.mark.parametrize("length", [1, 3, 8, 17, 400])
def test_powers_of_two_are_exact(length: int):
    """The scales rest on it, in the vector body of `exp2` and in its tail."""
    exponent = torch.arange(-200, 200)[:length]
    expected = torch.tensor([2.0**e for e in exponent.tolist()], dtype=torch.float64)
    assert torch.equal(exponent.double().exp2_(), expected)
