"""GEMMs on a GPU: the same bits over tiles, slices and cuts, and what happens at the edges of float32."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from ntp_kernels import cut_scale, gemm, integer_model, tuning

pytestmark = pytest.mark.gpu

SLICES = ((0, 1), (3, 19), (0, 128), (128, 300), (0, 300))
CUTS = (
    [0, 1, 512],
    [0, 256, 512],
    [0, 7, 300, 512],
    [0, 127, 128, 129, 512],
    [0, 60, 130, 250, 411, 512],
    [0, 16, 31, 200, 201, 400, 512],
    [0, 3, 100, 180, 256, 300, 444, 512],
    [0, 64, 128, 192, 256, 320, 384, 448, 512],
)


NOTHING = -(1 << 31)
"""An integer that no chain can have."""


def tiles(op: tuning.Op, *candidates: tuning.Tile) -> list[tuning.Tile]:
    """Every tile of the shipped table, every candidate and the plain tile."""
    tuned = [tile for _, tile in tuning.entries(torch.cuda.get_device_name()).get(op, ())]
    return list(dict.fromkeys([*tuned, *tuning.CANDIDATES[op], tuning.PLAIN]))


def scales(a: torch.Tensor, w: torch.Tensor) -> tuple[gemm.RowScale, torch.Tensor]:
    rows = a.shape[2]
    return (
        cut_scale.row_scale(cut_scale.row_norms(a), rows),
        cut_scale.column_scale(w),
    )


def product(a: torch.Tensor, w: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    row, column = scales(a, w)
    return gemm.finish(gemm.cut_matmul(a, w, row, column, a.shape[1]), row, column, a.shape[1], dtype)


def exact(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a.flatten(1).double() @ w.flatten(0, 1).double()


def model_start(row: gemm.RowScale, column: torch.Tensor) -> np.ndarray:
    bound = (row.bound[:, None] * column[None, :]).cpu().numpy()
    return integer_model.chain_start(np.frexp(bound)[1] + 1)


def test_linear_has_the_same_bits_with_every_tile_and_slice(draw) -> None:
    for m, units, rows, d in ((300, 5, 48, 272), (1030, 3, 272, 512)):
        x, w = draw(m, d), draw(units, rows, d)
        expected = gemm.linear(x, w, tile=tuning.PLAIN)
        for tile in tiles("linear"):
            assert torch.equal(gemm.linear(x, w, tile=tile), expected), tile
        for begin, end in SLICES:
            assert torch.equal(gemm.linear(x[begin:end].contiguous(), w), expected[begin:end])
        for unit in range(units):
            assert torch.equal(gemm.linear(x, w[unit : unit + 1])[:, 0], expected[:, unit])


def test_linear_equals_the_integer_model(draw) -> None:
    x, w = draw(48, 512), draw(3, 16, 512)
    y = gemm.linear(x, w, out_dtype=torch.float32).flatten(1)
    model = integer_model.matmul(x.float().cpu().numpy(), w.flatten(0, 1).float().cpu().numpy())
    assert np.array_equal(y.cpu().numpy(), model)
    rounded = torch.from_numpy(model).bfloat16()
    assert torch.equal(gemm.linear(x, w).flatten(1).cpu(), rounded)


def test_wgrad_has_the_same_bits_with_every_tile_and_shard(draw) -> None:
    for m, units, rows, d in ((300, 5, 48, 272), (1030, 3, 272, 512), (136, 6, 384, 4096)):
        dy, x, start = draw(m, units, rows), draw(m, d), draw(units, rows, d, dtype=torch.float32)
        expected = start.clone()
        gemm.linear_wgrad(dy, x, expected, tile=tuning.PLAIN)
        for tile in tiles("wgrad"):
            out = start.clone()
            gemm.linear_wgrad(dy, x, out, tile=tile)
            assert torch.equal(out, expected), tile
        for unit in range(units):
            out = start[unit : unit + 1].clone()
            gemm.linear_wgrad(dy[:, unit : unit + 1].contiguous(), x, out)
            assert torch.equal(out[0], expected[unit])


def trained(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`a` and `w` as training leaves them: some rows and columns share a direction, so that chains stray."""
    rows = torch.arange(a.shape[0], device=a.device) % 7 < 3
    columns = torch.arange(w.shape[2], device=w.device) % 5
    a = torch.where(rows[:, None, None], a + 0.5, a)
    return a, torch.where(columns < 2, w + (1.0 - 2.0 * columns), w).to(w.dtype)


@pytest.fixture
def bank(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The memory for strayed chains of every call to come, filled with `NOTHING`."""
    from ntp_kernels import gemm_hopper

    make, made = gemm_hopper._bank, []

    def spy(*arguments: object) -> torch.Tensor:
        made.append(make(*arguments).fill_(NOTHING))
        return made[-1]

    monkeypatch.setattr(gemm_hopper, "_bank", spy)
    return made


def is_used(bank: torch.Tensor) -> bool:
    return bool((bank != NOTHING).any())


@pytest.mark.parametrize("kind", ["gauss", "trained"])
@pytest.mark.parametrize("long", [False, True])
def test_cut_integers_are_the_same_with_every_tile_and_slice(
    draw, long: bool, kind: str, bank: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr(cut_scale, "LONG_CONTRACTION", 1024)
    for m, units, rows, d in ((300, 512, 16, 272), (300, 70, 128, 272), (130, 3, 1280, 512)):
        a, w = draw(m, units, rows), draw(units, rows, d)
        if kind == "trained":
            a, w = trained(a, w)
        row, column = scales(a, w)
        expected = gemm.cut_matmul(a, w, row, column, units, tile=tuning.PLAIN)
        for tile in tiles("cut"):
            assert torch.equal(gemm.cut_matmul(a, w, row, column, units, tile=tile), expected), tile
        for begin, end in SLICES:
            part, scale = a[begin:end].contiguous(), gemm.RowScale(*(x[begin:end] for x in row))
            assert torch.equal(gemm.cut_matmul(part, w, scale, column, units), expected[begin:end])
    assert any(map(is_used, bank)) == (kind == "trained")


@pytest.mark.parametrize("form", ["chain", "leaf", "long chain"])
@pytest.mark.parametrize("kind", ["gauss", "outlier", "cancel"])
def test_any_cut_in_any_order_adds_up(draw, form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "long chain":
        form = "chain"
        monkeypatch.setattr(cut_scale, "LONG_CONTRACTION", 4096)
    a, w = draw(300, 512, 16), draw(512, 16, 272)
    if kind == "outlier":
        a[:, [3, 200, 511], 5] *= 300
    if kind == "cancel":
        a[:, 256:], w[256:] = a[:, :256], -w[:256]
    row, column = scales(a, w)
    whole = gemm.cut_matmul(a, w, row, column, 512, form=form)
    for cuts in CUTS:
        parts = [
            gemm.cut_matmul(a[:, i:j].contiguous(), w[i:j], row, column, 512, i, form=form)
            for i, j in pairwise(cuts)
        ]
        assert torch.equal(sum(parts), whole), cuts
        assert torch.equal(sum(reversed(parts)), whole), cuts


def test_a_chain_that_strays_loses_nothing(draw) -> None:
    """Rows parallel to columns: every segment moves the chain by its whole bound."""
    a, w = draw(300, 64, 128), draw(64, 128, 272)
    w[:, :, :16] = a[:16].permute(1, 2, 0)
    row, column = scales(a, w)
    for form in ("chain", "leaf"):
        total = gemm.cut_matmul(a, w, row, column, 64, form=form)
        result = gemm.finish(total, row, column, 64, torch.float32)
        assert (result.double() - exact(a, w)).norm() < 1e-3 * exact(a, w).norm()
    plain = gemm.cut_matmul(a, w, row, column, 64, tile=tuning.PLAIN)
    assert torch.equal(gemm.cut_matmul(a, w, row, column, 64), plain)


@pytest.mark.parametrize("tile", tuning.CANDIDATES["cut"], ids=str)
def test_what_one_tile_has_banked_is_not_the_next_ones(draw, tile: tuning.Tile, bank) -> None:
    """More tiles than programs, of which some stray and some do not; and again in the same memory."""
    a, w = trained(draw(5000, 40, 128), draw(40, 128, 4112))
    w[:, :, 1024:3072] = draw(40, 128, 2048)
    row, column = scales(a, w)
    expected = gemm.cut_matmul(a, w, row, column, 40, tile=tuning.PLAIN)
    for _ in range(2):
        assert torch.equal(gemm.cut_matmul(a, w, row, column, 40, tile=tile), expected)
    assert all(map(is_used, bank))


def one_hot_like(tokens: int, units: int) -> torch.Tensor:
    """Gradients of logits bf16 [tokens, units, 128]: eight likely elements each, a target drawn among all."""
    generator = torch.Generator("cuda").manual_seed(3)
    logits = torch.randn(tokens, units * 128, generator=generator, device="cuda")
    likely = torch.randint(units * 128, (tokens, 8), generator=generator, device="cuda")
    high = 14 + 2 * torch.randn(tokens, 8, generator=generator, device="cuda")
    probability = logits.scatter_add(1, likely, high).softmax(1)
    target = probability.multinomial(1, generator=generator)
    gradient = probability.scatter_add(1, target, -torch.ones_like(target, dtype=torch.float32))
    return gradient.bfloat16().view(tokens, units, 128)


def test_gradients_of_logits_stray_nowhere_and_are_rounded_as_they_should(
    draw, bank: list[torch.Tensor]
) -> None:
    a, w = one_hot_like(300, 1002), draw(1002, 128, 272)
    result, truth = product(a, w).double(), exact(a, w)
    assert [is_used(memory) for memory in bank] == [False]
    assert (result - truth).norm() < 1.02 * (truth.bfloat16().double() - truth).norm()
    offset = (result - truth).sum(0) / truth.abs().sum(0)
    assert offset.abs().max() < 1e-3, "an error of one sign for all tokens would not average out"


def test_cut_equals_the_integer_model_to_the_last_bf16_bit(draw) -> None:
    a, w = draw(48, 32, 16), draw(32, 16, 64)
    row, column = scales(a, w)
    total = gemm.cut_matmul(a, w, row, column, 32)
    flat_w = np.ascontiguousarray(w.flatten(0, 1).float().cpu().numpy().T)
    start = model_start(row, column)
    chain = integer_model.matmul(a.flatten(1).float().cpu().numpy(), flat_w, start)
    integers = integer_model.chain_integer(chain) + 3 * 512 // 128
    assert np.array_equal(total.cpu().numpy(), integers)
    value = torch.from_numpy(integers.astype(np.float32) * (start / np.float32(1.5) * np.float32(2.0**-23)))
    assert torch.equal(gemm.finish(total, row, column, 32, torch.bfloat16).cpu(), value.bfloat16())


def test_the_two_group_counter_example_keeps_its_sign(device: torch.device) -> None:
    """Norms of exactly 1 in float32: without slack the sum of -1 - 2^-24 would wrap to the other sign."""
    a = torch.zeros(1, 2, 16, device=device, dtype=torch.bfloat16)
    a[0, 0, 0], a[0, 1, 0] = 1, -(2.0**-12)
    w = torch.zeros(2, 16, 16, device=device, dtype=torch.bfloat16)
    w[0, 0, 0], w[1, 0, 0] = -1, 2.0**-12
    result = product(a, w, torch.float32)
    assert torch.allclose(result[0, 0].double(), torch.tensor(-1 - 2.0**-24).double().to(device), rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_values_poison_exactly_their_row_and_column(draw, bad: float) -> None:
    a, w = draw(300, 64, 128), draw(64, 128, 272)
    a[17, 40, 3] = bad
    w[63, 127, 200] = bad
    expected = torch.zeros(300, 272, dtype=torch.bool, device=a.device)
    expected[17], expected[:, 200] = True, True
    assert torch.equal(product(a, w).isnan(), expected)


def test_zero_rows_and_columns_give_zero_bits(draw) -> None:
    a, w = draw(300, 64, 128), draw(64, 128, 272)
    a[5], w[:, :, 9] = 0, 0
    result = product(a, w).view(torch.int16)
    assert (result[5] == 0).all()
    assert (result[:, 9] == 0).all()


@pytest.mark.parametrize(("size_a", "size_w"), [(1e30, 1.0), (1e30, 1e-30), (1e-39, 1.0), (1e-39, 1e30)])
def test_values_at_the_edge_of_float32_come_out_right(draw, size_a: float, size_w: float) -> None:
    a = (draw(64, 4, 16).double() * size_a).bfloat16()
    w = (draw(4, 16, 64).double() * size_w).bfloat16()
    result, truth = product(a, w, torch.float32).double(), exact(a, w)
    assert (result - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.parametrize(("size_a", "size_w"), [(1e30, 1e30), (3e38, 3e38), (1e25, 1e13)])
def test_a_product_beyond_float32_is_infinite_not_garbage(draw, size_a: float, size_w: float) -> None:
    a = (draw(64, 4, 16).double().clamp(-1, 1) * size_a).bfloat16()
    w = (draw(4, 16, 64).double().clamp(-1, 1) * size_w).bfloat16()
    assert torch.isinf(product(a, w)).all()


def test_bias_grad_does_not_depend_on_the_shard(draw) -> None:
    dy, out = draw(1000, 5, 48), draw(5, 48, dtype=torch.float32)
    whole, part = out.clone(), out[2:3].clone()
    gemm.bias_grad(dy, whole)
    gemm.bias_grad(dy[:, 2:3].contiguous(), part)
    assert torch.equal(whole[2:3], part)
    assert torch.allclose(whole.double(), out.double() + dy.double().sum(0), rtol=1e-5, atol=1e-4)
