"""Initial weights: a function of seed, parameter, unit and element."""

import struct

import pytest
import torch
from ntp_kernels import dispatch as kernels

from ntp.initial import initial_units
from ntp.parameters import parameter_specs
from ntp.units import UnitRange
from tests.shapes import ODD, make_config
from tests.test_data import philox

SPECS = {spec.name: spec for spec in parameter_specs(make_config({**ODD, "qkv_bias": True}).model)}


@pytest.mark.parametrize("name", SPECS)
def test_a_unit_has_the_same_values_in_every_range(name: str):
    spec = SPECS[name]
    whole = initial_units(spec, UnitRange(0, spec.units), seed=3, std=0.02)
    for start in range(spec.units + 1):
        held = UnitRange(start, min(spec.units, start + 2))
        assert torch.equal(initial_units(spec, held, seed=3, std=0.02), whole[held.start : held.stop])


def test_padding_is_zero():
    """FFN blocks of 64 hold 1000 columns, vocabulary blocks of 64 hold 509 rows."""
    real = {
        "layers.0.gate_up": [*range(40), *range(64, 104)],
        "layers.0.down": list(range(40)),
        "embedding": list(range(61)),
    }
    for name, rows in real.items():
        spec = SPECS[name]
        values = initial_units(spec, UnitRange(spec.units - 1, spec.units), seed=3, std=0.02)
        assert values.view(spec.unit_shape).abs().amax(1).nonzero().flatten().tolist() == rows, name


def test_values_are_normal_and_differ_between_seeds_parameters_and_units():
    spec = SPECS["layers.0.down"]
    values = initial_units(spec, UnitRange(0, 8), seed=3, std=0.5).double()
    assert abs(values.std().item() / 0.5 - 1) < 0.02
    assert abs(values.mean().item()) < 0.01
    assert len(values.unique()) > 0.9 * values.numel() - 1000
    others = [
        initial_units(spec, UnitRange(0, 8), 4, 0.5),
        initial_units(SPECS["head"], UnitRange(0, 8), 3, 0.5),
    ]
    for other in others:
        assert not torch.isclose(values, other.double()).double().mean() > 0.01
    assert not torch.isclose(values[0], values[1]).double().mean() > 0.01


def test_a_value_is_the_sum_of_the_sixteen_integers_of_its_counter():
    """In every piece that a CPU computes at once, and beyond 2^32."""
    key, first, count = bytes(range(16)), 2**32 - 70_000, 140_000
    values = torch.empty(count)
    kernels.fill_normal(values, key, first, 0.5)
    low, high = struct.unpack("<QQ", key)
    for place in (0, 1, 65_535, 65_536, 69_998, 69_999, 70_000, 131_071, 131_072, count - 1):
        words = philox(first + place + 1, (low, high))
        total = sum(word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48))
        assert values[place] == (total - 8 * 65535) * 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_has_the_bits_of_the_cpu_and_room_for_the_values_is_enough():
    """Blocks of torch's allocator may be 1 MiB larger than what was asked for."""
    large = make_config({**ODD, "hidden_size": 2048, "vocab_size": 5000, "vocab_unit": 512})
    specs = (*SPECS.values(), *parameter_specs(large.model))
    for spec in specs:
        held = UnitRange(spec.units // 3, spec.units)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        values = initial_units(spec, held, seed=3, std=0.02, device="cuda")
        assert torch.cuda.max_memory_allocated() - before <= values.nbytes + 2**21, spec.name
        cpu = initial_units(spec, held, seed=3, std=0.02)
        assert torch.equal(values.cpu().view(torch.int32), cpu.view(torch.int32)), spec.name
