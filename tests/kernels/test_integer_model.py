"""The integer model of the tensor core against outputs captured from an H100."""

from pathlib import Path

import numpy as np
import pytest
from ntp_kernels import integer_model

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
