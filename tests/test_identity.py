"""The gradient exchange returns the right value for every element, whatever the degrees on its two sides.

Gradients encode (parameter, unit, element, replica's groups), so that a value that lands in a wrong place is
seen; constant gradients would hide it. The expected values come from a dictionary over units, not from the
code under test.
"""

import itertools

import pytest
import torch

from ntp.ddp import DistributedDataParallel, NonuniformTPDistributedDataParallel
from ntp.parameters import parameter_specs
from ntp.plan import make_plan
from ntp.testing import simulate
from tests.shapes import LLAMA, make_config

SHAPE = {**LLAMA, "num_hidden_layers": 1, "qkv_bias": True, "qk_norm": True}


class Slot:
    """A weight as the wrappers see it."""

    def __init__(self):
        self.data = self.main_grad = self.on_grad_ready = None


def encoded(spec, unit, group):
    """Gradient of one unit from one group: small integers, so that every sum is exact."""
    elements = torch.arange(spec.unit_elements, dtype=torch.float32)
    return elements % 251 + 256 * (unit % 64) + 16384 * (spec.index % 8) + 131072 * (group + 1)


def exchange(member, wrapper, specs, overlap):
    weights = {spec.name: Slot() for spec in specs}
    ddp = wrapper(specs, weights, member.plan, member.mesh, overlap=overlap, bucket_elements=2000)
    for index in ddp.microbatches():
        for spec in reversed(specs):
            held = ddp.buffer.held[spec.name]
            flat = weights[spec.name].main_grad.view(len(held), -1)
            for row, unit in enumerate(held):
                flat[row] += encoded(spec, unit, index)
            if weights[spec.name].on_grad_ready is not None:
                weights[spec.name].on_grad_ready()
    gradients = ddp.sync()
    return {key: (ddp.buffer.carried(by_name(specs, key[0])), value) for key, value in gradients.items()}


def by_name(specs, name):
    return next(spec for spec in specs if spec.name == name)


def check(plan, specs, results, groups):
    """Every element of every unit arrives at each of its keepers and equals the sum over all groups."""
    for spec in specs:
        total = {u: sum(encoded(spec, u, g) for g in range(groups)) for u in range(spec.units)}
        keepers = {unit: torch.zeros(spec.unit_elements) for unit in range(spec.units)}
        for result in results.values():
            for (name, start), (units, values) in result.items():
                for row, unit in enumerate(units if name == spec.name else ()):
                    stop = start + values.shape[1]
                    assert torch.equal(values[row], total[unit][start:stop]), (name, unit)
                    keepers[unit][start:stop] += 1
        for count in keepers.values():
            assert (count >= plan.copies).all(), spec.name
            assert spec.kind is None or (count == plan.copies).all(), spec.name


@pytest.mark.parametrize(("overlap", "copies"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("degrees", list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_exchange_between_any_two_degrees_is_exact(degrees, overlap, copies):
    config = make_config(
        SHAPE, parallel={"dp": 2, "tp": 4}, train={"global_batch": 7}, optimizer={"copies": copies}
    )
    failed = [r * 4 + p for r, degree in enumerate(degrees) for p in range(degree, 4)]
    plan, specs = make_plan(config, failed), parameter_specs(config.model)
    assert tuple(replica.degree for replica in plan.replicas) == degrees
    results = simulate(
        lambda member: exchange(member, NonuniformTPDistributedDataParallel, specs, overlap), plan
    )
    check(plan, specs, results, groups=7)


@pytest.mark.parametrize("tp", [1, 3])
def test_the_uniform_classes_give_the_same_sums(tp):
    config = make_config(SHAPE, parallel={"dp": 3, "tp": tp}, train={"global_batch": 7})
    plan, specs = make_plan(config), parameter_specs(config.model)
    results = simulate(lambda member: exchange(member, DistributedDataParallel, specs, True), plan)
    check(plan, specs, results, groups=7)


def test_a_replica_without_groups_still_takes_part():
    config = make_config(SHAPE, parallel={"dp": 3, "tp": 2}, train={"global_batch": 2})
    plan, specs = make_plan(config, {0}), parameter_specs(config.model)
    assert sorted(len(replica.groups) for replica in plan.replicas) == [0, 1, 1]
    results = simulate(
        lambda member: exchange(member, NonuniformTPDistributedDataParallel, specs, True), plan
    )
    check(plan, specs, results, groups=2)
