"""Values of initial weights: the kernel's bits are numpy's, whatever the key, the position, the length."""

import hashlib
import math
import struct

import pytest
import torch
from ntp_kernels.initial import fill_normal
from ntp_kernels.reference import initial as twin
from torch import Tensor

SCALE = 0.02 / math.sqrt(16 * (65536**2 - 1) / 12)
KEY = hashlib.sha256(b"3/layers.0.down").digest()[:16]
KEYS = {
    "hashed": KEY,
    "zeros": bytes(16),
    "ones": b"\xff" * 16,
    "one and 2^63": struct.pack("<QQ", 1, 1 << 63),
}


def both(device: torch.device, count: int, key: bytes, first: int, scale: float) -> tuple[Tensor, Tensor]:
    """Bits of the kernel and of the twin, neither of which touched what is beside the place to fill."""
    results = []
    for fill, place in ((fill_normal, device), (twin.fill_normal, torch.device("cpu"))):
        wide = torch.full((count + 2,), 7.0, device=place)
        fill(wide[1:-1], key, first, scale)
        assert wide[[0, -1]].tolist() == [7.0, 7.0]
        results.append(wide[1:-1].cpu().view(torch.int32))
    return results[0], results[1]


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("first", [0, 1, 2**31 - 500, 2**32 - 500, 2**40 + 3, 2**62])
def test_the_kernel_has_the_bits_of_numpy(device, key, first):
    ours, numpys = both(device, 1001, key, first, SCALE)
    assert torch.equal(ours, numpys)
    assert len(ours.unique()) > 900


@pytest.mark.parametrize("count", [1, 7, 1024, 1025, 3000])
def test_a_length_of_any_size_is_filled_and_nothing_else(device, count):
    assert torch.equal(*both(device, count, KEY, 5, SCALE))


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-45, 1e30, 2.0**-150, 0.0])
def test_the_scale_is_a_float64_and_the_result_is_rounded_once(device, scale):
    assert torch.equal(*both(device, 1024, KEY, 0, scale))


def test_a_part_has_the_bits_of_the_whole(device):
    whole = torch.empty(2500, device=device)
    fill_normal(whole, KEY, 10, SCALE)
    part = torch.empty(1100, device=device)
    fill_normal(part, KEY, 1234, SCALE)
    assert torch.equal(part, whole[1224:2324])


@pytest.mark.gpu
def test_millions_of_values_have_the_bits_of_numpy(device):
    for first in (0, 2**32 - 2**21):
        assert torch.equal(*both(device, 2**22 + 1, KEY, first, SCALE))
