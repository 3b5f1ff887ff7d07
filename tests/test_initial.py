"""Initial weights: a function of seed, parameter, unit and element."""

import pytest
import torch

from ntp.initial import initial_units
from ntp.parameters import parameter_specs
from ntp.units import UnitRange
from tests.shapes import ODD, make_config

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
