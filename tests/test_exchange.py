"""Exchanges that are late and in parts: the same bits, nothing read too early, nothing forgotten."""

import pytest
import torch

from ntp.data import datasets_of
from ntp.exchange import Backlog
from ntp.testing import SimulatedGroup
from tests.late_exchange import LateExchange, LateWholeExchange
from tests.shapes import LLAMA, QWEN, make_config
from tests.training import train

MESHES = [({"dp": 1, "tp": 3}, ()), ({"dp": 2, "tp": 2}, (3,)), ({"dp": 2, "tp": 4}, (1, 2, 6))]


@pytest.fixture
def late(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(SimulatedGroup, "_make_exchange", lambda group: LateExchange(group))


def configuration(model, parallel, **train):
    return make_config(model, parallel=parallel, train={"steps": 2, "dtype": "bfloat16", **train})


@pytest.mark.parametrize("model", [LLAMA, QWEN])  # Qwen's head is tied: its gradient has two parts
def test_late_parts_give_the_bits_of_one_rank_on_every_mesh(late, model):
    config = configuration(model, {"dp": 1, "tp": 1})
    data = datasets_of(config)
    alone = train(config, data)
    for parallel, failed in MESHES:
        run = train(configuration(model, parallel), data, failed)
        assert run.steps == alone.steps
        assert run.hashes == alone.hashes


@pytest.mark.parametrize("model", [LLAMA, QWEN])
def test_nothing_deferred_is_forgotten(monkeypatch, model):
    torch.set_num_threads(1)
    config = configuration(model, {"dp": 1, "tp": 2})
    data = datasets_of(config)
    at_once = train(config, data)
    monkeypatch.setattr(SimulatedGroup, "_make_exchange", lambda group: LateWholeExchange(group))
    assert train(config, data).hashes == at_once.hashes


@pytest.mark.parametrize("recompute", ["pointwise", "attention", "block"])
def test_recomputation_keeps_the_bits(late, recompute):
    config = configuration(LLAMA, {"dp": 1, "tp": 2})
    data = datasets_of(config)
    again = configuration(LLAMA, {"dp": 1, "tp": 2}, recompute=recompute)
    assert train(again, data).hashes == train(config, data).hashes


def test_an_output_that_nobody_waits_for_is_noticed(late, monkeypatch):
    monkeypatch.setattr(LateExchange, "wait", lambda self, output, rows=None: None)
    config = configuration(LLAMA, {"dp": 1, "tp": 2})
    with pytest.raises(Exception, match="gradient norm is nan"):
        train(config, datasets_of(config))


def test_a_backlog_does_the_newest_first_and_no_more_than_asked():
    done = []
    backlog = Backlog()
    for name in "abc":
        backlog.add(lambda name=name: done.append(name), flops=10.0)
    backlog.run(15.0)
    assert done == ["c", "b"]
    backlog.run()
    assert done == ["c", "b", "a"]
    backlog.run()
    assert len(done) == 3
