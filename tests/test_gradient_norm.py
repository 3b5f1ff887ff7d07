"""The gradient norm has the same bits on every mesh, whoever keeps which blocks, and in how many copies."""

import math

import pytest
import torch

from ntp.config import OptimizerConfig
from ntp.parameters import parameter_specs
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import make_weights, wrap
from tests.shapes import LLAMA, make_config

SPECS = parameter_specs(make_config({**LLAMA, "hidden_size": 256, "num_hidden_layers": 1}).model)
DRAWS = 12  # so many norms, each rounded to 53 bits: one of them shows another order


def unit_gradient(spec, unit, draw):
    """Gaussian, of another size in every unit."""
    generator = torch.Generator().manual_seed(draw * 10000 + spec.index * 100 + unit)
    return torch.randn(spec.unit_elements, generator=generator) * 3.0 ** (unit % 5)


def norms(failed, parallel, copies):
    config = make_config(
        {**LLAMA, "hidden_size": 256, "num_hidden_layers": 1}, parallel=parallel, optimizer={"copies": copies}
    )

    def body(member):
        torch.set_num_threads(1)
        weights = make_weights(SPECS, member.plan, member.rank)
        _, optimizer = wrap(SPECS, weights, member.plan, member.mesh, OptimizerConfig())
        found = []
        for draw in range(DRAWS):
            gradients = {
                (part.spec.name, part.start): torch.stack(
                    [unit_gradient(part.spec, unit, draw)[part.start : part.stop] for unit in part.units]
                )
                for part in optimizer.slices
            }
            found.append(optimizer.vote(gradients, tokens=1))
        return found

    results = list(simulate(body, make_plan(config, failed)).values())
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def alone():
    return norms((), {"dp": 1, "tp": 1}, 1)


def test_the_norm_agrees_with_one_sum_in_float64(alone):
    for draw, norm in enumerate(alone):
        units = [unit_gradient(spec, unit, draw) for spec in SPECS for unit in range(spec.units)]
        assert norm == pytest.approx(math.sqrt(math.fsum(torch.cat(units).double().square().tolist())), 1e-14)


@pytest.mark.parametrize(
    ("failed", "parallel", "copies"),
    [
        ((), {"dp": 1, "tp": 3}, 1),
        ((), {"dp": 3, "tp": 2}, 2),
        ((3,), {"dp": 2, "tp": 4}, 2),
        ((0, 5, 6), {"dp": 3, "tp": 3}, 3),
    ],
)
def test_the_norm_has_the_same_bits_on_every_mesh(alone, failed, parallel, copies):
    assert norms(failed, parallel, copies) == alone
