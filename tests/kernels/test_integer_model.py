"""The integer model of the tensor core against outputs captured from an H100, and what follows from it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ntp_kernels import cut_scale, integer_model

KINDS = ("gauss", "outlier", "cancel", "tiny", "huge")
GOLDEN = Path(__file__).parent.parent / "data" / "mma_h100.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


def operands(golden: dict[str, np.ndarray], kind: str) -> tuple[np.ndarray, np.ndarray]:
    return tuple(integer_model.bf16_from_bits(golden[f"{kind}_{side}"]) for side in "ab")


@pytest.mark.parametrize("kind", KINDS)
def test_plain_chain_equals_the_hardware(golden: dict[str, np.ndarray], kind: str) -> None:
    a, b = operands(golden, kind)
    assert np.array_equal(integer_model.matmul(a, b).view(np.int32), golden[f"{kind}_plain"])


@pytest.mark.parametrize("kind", KINDS)
def test_biased_chain_equals_the_hardware(golden: dict[str, np.ndarray], kind: str) -> None:
    a, b = operands(golden, kind)
    start = integer_model.chain_start(golden[f"{kind}_e"])
    whole = integer_model.chain_integer(integer_model.matmul(a, b, start))
    assert np.array_equal(whole, golden[f"{kind}_whole"])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_biased_chain_equal_the_hardware_and_add_up(
    golden: dict[str, np.ndarray], kind: str
) -> None:
    a, b = operands(golden, kind)
    start = integer_model.chain_start(golden[f"{kind}_e"])
    total = np.zeros_like(golden[f"{kind}_whole"])
    for part, (begin, end) in enumerate(zip(golden["cuts"], golden["cuts"][1:], strict=False)):
        accumulator = integer_model.matmul(a[:, begin:end], b[:, begin:end], start)
        integers = integer_model.chain_integer(accumulator)
        assert np.array_equal(integers, golden[f"{kind}_parts"][part])
        total += integers
    assert np.array_equal(total, golden[f"{kind}_whole"])


def logit_gradients(tokens: int, columns: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """One large element a row and a tail of which little reaches the grid, and weights; bf16."""
    rng = np.random.default_rng(5)
    a = bf16(rng.lognormal(-22.0, 2.0, (tokens, k)))
    a[np.arange(tokens), [7, 3000, 60000]] = (-0.5, -0.125, -0.9375)
    return a, bf16(rng.normal(0, 0.02, (columns, k)))


def bf16(values: np.ndarray) -> np.ndarray:
    """The values, cut to bf16."""
    return (values.astype(np.float32).view(np.int32) & -65536).view(np.float32)


def segment_chains(
    a: np.ndarray, w: np.ndarray, exponent: np.ndarray, period: int
) -> Iterator[tuple[np.ndarray, int]]:
    """For every segment of 1024 the integers of a chain through it and all before, and their correction.

    The chain crosses zero after every `period` segments.
    """
    chain, sign, correction = integer_model.chain_start(exponent), 1, 0
    for k in range(0, a.shape[1], 1024):
        chain = integer_model.matmul(a[:, k : k + 1024], w[:, k : k + 1024], chain)
        correction += sign * 24  # 3/8 for each of 64 groups
        yield sign * integer_model.chain_integer(chain), correction
        if (k // 1024 + 1) % period == 0:
            chain = (chain - sign * 3 * np.ldexp(np.float32(1), exponent)).astype(np.float32)
            sign = -sign


def test_a_tail_below_the_grid_needs_chains_that_cross_zero() -> None:
    """The correction of the floor is for losses that such a row does not have."""
    a, w = logit_gradients(3, 8, 65 * 1024)
    exact = a.astype(np.float64) @ w.astype(np.float64).T
    bound = np.abs(a).max(1)[:, None] * np.sqrt((w.reshape(8, -1, 32) ** 2).sum(2)).max(1)[None, :]
    exponent = np.frexp(2.0 * bound)[1] + 1

    def error(period: int) -> float:
        *_, (integers, correction) = segment_chains(a, w, exponent, period)
        result = (integers + correction) * np.ldexp(1.0, exponent - 23)
        return np.linalg.norm(result - exact) / np.linalg.norm(exact)

    assert error(cut_scale.CROSSING) < 2e-4
    assert error(1000) > 4e-3, "twice the rounding to bf16"


def test_a_row_of_one_large_element_never_leaves_the_window_of_a_long_contraction() -> None:
    a, w = logit_gradients(3, 8, 65 * 1024)
    blocks = np.sqrt((a.reshape(3, -1, 32) ** 2).sum(2)).reshape(3, -1, 32).sum(2).max(1)
    # Weights of the targets as large as a column's largest block.
    w[:, [7, 3000, 60000]] = np.sqrt((w.reshape(8, -1, 32) ** 2).sum(2)).max(1)[:, None]
    bound = blocks[:, None] * np.sqrt((w.reshape(8, -1, 32) ** 2).sum(2)).max(1)[None, :] * cut_scale.SLACK
    allowance = cut_scale.LONG_LEAST_ALLOWANCE
    exponent = np.frexp(bound * (1 + allowance))[1] + 1
    window = 2**22 * allowance / (1 + allowance)
    for integers, _ in segment_chains(a, w, exponent, cut_scale.CROSSING):
        assert np.abs(integers).max() < window
