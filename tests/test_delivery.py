"""Gradients pushed into the inboxes of their receivers: every element in its place, the same bits."""

import itertools

import pytest
import torch

from ntp.data import datasets_of
from ntp.ddp import NonuniformTPDistributedDataParallel
from ntp.parameters import parameter_specs
from ntp.plan import make_plan
from ntp.testing import SimulatedGroup, simulate
from tests import test_balance
from tests.late_delivery import LateDelivery
from tests.shapes import LLAMA, QWEN, make_config
from tests.test_identity import SHAPE, check, exchange
from tests.training import train

soon = test_balance.soon


@pytest.fixture
def pushed(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(
        SimulatedGroup,
        "peer_delivery",
        lambda group, *what: LateDelivery(group, *what) if group.size > 1 else None,
    )


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("degrees", list(itertools.combinations_with_replacement((1, 2, 3, 4), 2)))
def test_pushes_between_any_two_degrees_arrive_in_their_places(pushed, degrees, copies):
    config = make_config(
        SHAPE, parallel={"dp": 2, "tp": 4}, train={"global_batch": 7}, optimizer={"copies": copies}
    )
    failed = [r * 4 + p for r, degree in enumerate(degrees) for p in range(degree, 4)]
    plan, specs = make_plan(config, failed), parameter_specs(config.model)
    results = simulate(
        lambda member: exchange(member, NonuniformTPDistributedDataParallel, specs, True), plan
    )
    check(plan, specs, results, groups=7)


@pytest.mark.parametrize(
    ("model", "parallel", "copies", "failed"),
    [
        (LLAMA, {"dp": 2, "tp": 1}, 1, ()),
        (LLAMA, {"dp": 3, "tp": 2}, 2, ()),
        (QWEN, {"dp": 2, "tp": 4}, 2, (1, 2, 6)),
    ],
)
def test_pushed_gradients_and_parameters_give_the_bits_of_one_rank(pushed, model, parallel, copies, failed):
    train_section = {"steps": 3, "dtype": "bfloat16", "global_batch": 7}
    alone = make_config(model, parallel={"dp": 1, "tp": 1}, train=train_section)
    data = datasets_of(alone)
    expected = train(alone, data)
    sections = {"parallel": parallel, "train": train_section, "optimizer": {"copies": copies}}
    run = train(make_config(model, **sections), data, failed)
    assert run.steps == expected.steps
    assert run.hashes == expected.hashes


def test_a_delivery_follows_other_shares_in_mid_run(pushed, soon):
    """Shares by measured speed move groups between replicas, and with them what each of them sends."""
    test_balance.test_shares_that_switch_in_mid_run_change_no_bit_of_any_step(
        soon, {"dp": 2, "tp": 2}, (3,), "float32", overlap=True
    )
