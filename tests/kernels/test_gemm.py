"""GEMMs at tiny shapes: indexing, segments, scales and epilogues, with sums that any order makes exact."""

from itertools import pairwise

import pytest
import torch
from ntp_kernels import cut_scale, gemm, tuning

SMALL = tuning.Tile("plain", 32, 32, 16, stages=2, split=2, warps=4)


@pytest.fixture
def integers(device: torch.device):
    """Return `integers(*shape)`: seeded bf16 integers in [-2, 2]."""
    generator = torch.Generator().manual_seed(7)

    def sample(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).bfloat16().to(device)

    return sample


def exact(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """a [M, U, R] times w [U, R, D] in float64."""
    return torch.einsum("mur,urd->md", a.double(), w.double())


def scales(a: torch.Tensor, w: torch.Tensor) -> tuple[gemm.RowScale, torch.Tensor]:
    rows = a.shape[2]
    return (
        cut_scale.row_scale(cut_scale.row_norms(a), rows),
        cut_scale.column_scale(w),
    )


def grid_exponent(row_scale: gemm.RowScale, column_scale: torch.Tensor) -> torch.Tensor:
    """E of every element, from the scales."""
    bound = row_scale.bound[:, None] * column_scale[None, :]
    return torch.frexp(bound).exponent + 1


@pytest.mark.parametrize(("m", "units", "rows", "d"), [(5, 3, 16, 48), (40, 2, 32, 80)])
def test_linear_contracts_the_hidden_dimension(integers, m: int, units: int, rows: int, d: int) -> None:
    x, w = integers(m, d), integers(units, rows, d)
    y = gemm.linear(x, w, out_dtype=torch.float32, tile=SMALL)
    assert torch.equal(y.double(), torch.einsum("md,urd->mur", x.double(), w.double()))


def test_linear_adds_the_bias_before_it_rounds(integers) -> None:
    x, w, bias = integers(5, 48), integers(2, 16, 48), integers(2, 16)
    y = gemm.linear(x, w, bias, tile=SMALL)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.double(), torch.einsum("md,urd->mur", x.double(), w.double()) + bias.double())


def test_linear_wgrad_adds_to_what_is_there(integers) -> None:
    dy, x = integers(70, 2, 16), integers(70, 48)
    out = integers(2, 16, 48).float()
    expected = out.double() + torch.einsum("mur,md->urd", dy.double(), x.double())
    gemm.linear_wgrad(dy, x, out, tile=SMALL)
    assert torch.equal(out.double(), expected)


def test_bias_grad_adds_the_sum_over_tokens(integers) -> None:
    dy, out = integers(70, 2, 16), integers(2, 16).float()
    expected = out.double() + dy.double().sum(0)
    gemm.bias_grad(dy, out)
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("form", ["chain", "leaf"])
@pytest.mark.parametrize("rows", [16, 48])
def test_cut_integers_are_the_product_on_the_grid(integers, form: str, rows: int) -> None:
    a, w = integers(5, 4, rows), integers(4, rows, 48)
    row_scale, column_scale = scales(a, w)
    total = gemm.cut_matmul(a, w, row_scale, column_scale, 4, form=form)
    correction = 3 * 4 * rows // 128 if form == "chain" else 0
    expected = torch.ldexp(exact(a, w), 23 - grid_exponent(row_scale, column_scale))
    assert torch.equal(total.double() - correction, expected)


def test_a_chain_that_crosses_zero_is_the_product_on_the_grid(
    integers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_scale, "LONG_CONTRACTION", 8 * 16 - 1)
    monkeypatch.setattr(cut_scale, "SEGMENT", 96)  # long: 48, three units
    monkeypatch.setattr(cut_scale, "CROSSING", 1)
    a, w = integers(5, 8, 16), integers(8, 16, 48)
    row_scale, column_scale = scales(a, w)
    total = gemm.cut_matmul(a, w, row_scale, column_scale, 8)
    correction = 1 - 1 + 1  # 3/128 of 48, 96 and 128 products, rounded down: one for each side of zero
    expected = torch.ldexp(exact(a, w), 23 - grid_exponent(row_scale, column_scale))
    assert torch.equal(total.double() - correction, expected)


@pytest.mark.parametrize("form", ["chain", "leaf", "long chain"])
def test_any_cut_of_the_units_adds_up(integers, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Segments of three units: cuts fall inside segments and on their borders.
    monkeypatch.setattr(cut_scale, "SEGMENT", 96 if form == "long chain" else 48)
    if form == "long chain":
        form = "chain"
        monkeypatch.setattr(cut_scale, "LONG_CONTRACTION", 8 * 16 - 1)
        monkeypatch.setattr(cut_scale, "CROSSING", 1)
    a, w = integers(5, 8, 16), integers(8, 16, 48)
    row_scale, column_scale = scales(a, w)
    whole = gemm.cut_matmul(a, w, row_scale, column_scale, 8, form=form)
    for cuts in ([0, 1, 8], [0, 3, 8], [0, 2, 5, 7, 8], [0, 4, 8]):
        total = torch.zeros_like(whole)
        for begin, end in pairwise(cuts):
            part, share = a[:, begin:end].contiguous(), w[begin:end].contiguous()
            total += gemm.cut_matmul(part, share, row_scale, column_scale, 8, begin, form=form)
        assert torch.equal(total, whole)


def test_finish_undoes_the_grid(integers) -> None:
    a, w = integers(5, 4, 16), integers(4, 16, 48)
    row_scale, column_scale = scales(a, w)
    total = gemm.cut_matmul(a, w, row_scale, column_scale, 4, form="leaf")
    assert torch.equal(gemm.finish(total, row_scale, column_scale, 4, torch.float32).double(), exact(a, w))


def block_norms(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [..., R] -> the 2-norms of its blocks in float64 [..., R / block]."""
    return x.double().unflatten(-1, (-1, block)).norm(dim=-1)


@pytest.mark.parametrize(("rows", "block"), [(48, 16), (96, 32)])
def test_norms_add_blocks_of_a_row_and_take_the_largest_of_a_column(draw, rows: int, block: int) -> None:
    a, w = draw(5, 3, rows), draw(3, rows, 48)
    assert torch.allclose(cut_scale.row_norms(a).double(), block_norms(a, block).sum(-1).T, rtol=1e-5)
    largest = block_norms(w.transpose(1, 2), block).amax(-1).amax(0)
    assert torch.allclose(cut_scale.column_scale(w).double(), largest * cut_scale.SLACK, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30, 3e38])
def test_norms_of_tiny_and_huge_values_keep_their_accuracy(draw, size: float) -> None:
    a = (draw(5, 2, 16).double().clamp(-1, 1) * size).bfloat16()
    expected = block_norms(a, 16).sum(-1).T
    norms = cut_scale.row_norms(a).double()
    fits = expected < 3.4e38
    assert torch.allclose(norms[fits], expected[fits], rtol=1e-5)
    assert torch.isinf(norms[~fits]).all()


def test_scale_is_the_largest_segment_and_room_for_drift(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_scale, "SEGMENT", 48)
    a = draw(5, 20, 16)
    a[:, 4] *= 30
    norms = block_norms(a, 16).sum(-1)
    largest = torch.stack([norms[:, i : i + 3].sum(1) for i in range(0, 20, 3)]).amax(0)
    bound, window = cut_scale.row_scale(cut_scale.row_norms(a), 16)
    allowance = (cut_scale.DRIFT * norms.sum(1) / largest / (20 * 16) ** 0.5).clamp(0.25, 2)
    assert torch.allclose(bound.double(), largest * cut_scale.SLACK * (1 + allowance), rtol=1e-5)
    assert ((window.double() - 2**22 * allowance / (1 + allowance)).abs() <= 32).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_poisons_its_row_or_column_and_no_other(integers, bad: float) -> None:
    a, w = integers(5, 4, 16), integers(4, 16, 48)
    a[2, 1, 3] = bad
    w[3, 5, 7] = bad
    row_scale, column_scale = scales(a, w)
    total = gemm.cut_matmul(a, w, row_scale, column_scale, 4)
    result = gemm.finish(total, row_scale, column_scale, 4, torch.float32)
    expected = torch.zeros(5, 48, dtype=torch.bool, device=a.device)
    expected[2] = True
    expected[:, 7] = True
    assert torch.equal(result.isnan(), expected)


def test_zero_rows_and_columns_give_exact_zeros(integers) -> None:
    a, w = integers(5, 4, 16), integers(4, 16, 48)
    a[1] = 0
    w[:, :, 9] = 0
    row, column = scales(a, w)
    result = gemm.finish(gemm.cut_matmul(a, w, row, column, 4), row, column, 4, torch.bfloat16)
    assert (result[1].view(torch.int16) == 0).all()
    assert (result[:, 9].reshape(-1) == 0).all()


def test_a_segment_is_whole_units() -> None:
    assert [cut_scale.segment_units(8, rows) for rows in (16, 128, 768, 1280, 4352)] == [128, 16, 2, 1, 1]
    assert cut_scale.segment_units(1002, 128) == 8
