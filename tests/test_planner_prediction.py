"""The predicted step of a configuration: what a plan changes in it."""

from pathlib import Path

import pytest

from ntp.config import load_config
from ntp.planner.prediction import predict
from ntp.planner.study import Step

ONE_B = Path(__file__).parent.parent / "configs" / "1b-4xh100.yaml"
ELEMENTS = 2048 * (16 * (32 * 64 * 2 + 8 * 64 * 2 + 3 * 8192) + 128256)  # of the 1B shape without its norms


def prediction(*overrides, failed=(), domain_size=8):
    return predict(load_config(ONE_B, list(overrides)), failed, domain_size, Step())


def test_one_rank_sums_and_exchanges_nothing():
    found = prediction("parallel.dp=1", "parallel.tp=1")
    (only,) = found.replicas
    assert (only.microbatches, only.microbatch.sums, found.exchange) == (24, 0, 0)
    tokens = 24 * 2 * 4096
    assert only.microbatch.products * 24 == pytest.approx(6 * tokens * ELEMENTS / (989e12 * 0.63))
    assert found.update == pytest.approx(ELEMENTS * (46 + 24 * 4 + 23 * 12) / 3000e9)
    assert found.tokens == tokens
    assert found.step == pytest.approx(found.compute + found.update)


def test_two_replicas_exchange_as_many_partial_sums_as_the_tree_leaves():
    """24 groups: each replica's 12 end as sums of 8 and of 4, and go to both copies of the state."""
    found = prediction("parallel.tp=1")
    assert [replica.microbatches for replica in found.replicas] == [12, 12]
    assert found.exchange == pytest.approx(ELEMENTS / 2 * 2 * 2 * 4 / 300e9)
    even = prediction("parallel.tp=1", "train.global_batch=32")  # 16 groups: one sum each
    assert even.exchange == pytest.approx(ELEMENTS / 2 * 2 * 4 / 300e9)
    assert even.update < found.update
    moved = 46 + 12 + 8 * 4 + 7 * 12 + 2 * 4  # the other replica's sum, 8 groups of its own, what is sent
    assert even.update == pytest.approx(ELEMENTS * moved / 3000e9)
    once = prediction("parallel.tp=1", "train.global_batch=32", "optimizer.copies=1")
    assert once.exchange == pytest.approx(ELEMENTS / 2 * (4 + 2) / 300e9)  # parameters come back


def test_a_job_of_several_domains_exchanges_over_the_network():
    near, far = prediction(), prediction(domain_size=2)
    assert (near.link, far.link) == ("NVLink", "the network")
    assert far.exchange == pytest.approx(near.exchange * 300 / 50)


def test_a_lost_rank_moves_work_to_the_other_replica():
    damaged = prediction(failed={3})
    assert [replica.degree for replica in damaged.replicas] == [2, 1]
    assert [replica.microbatches for replica in damaged.replicas] == [16, 8]
    assert damaged.compute == max(replica.compute for replica in damaged.replicas)
    assert damaged.compute > prediction().compute


def test_parameters_come_back_where_degrees_differ():
    """Two copies on two replicas are all that a rank holds, unless the other replica is cut elsewhere."""
    damaged = prediction(failed={3})  # 16 and 8 groups: one partial sum each
    for replica in damaged.replicas:
        sent = ELEMENTS / replica.degree / 2 * (2 * 4 + 2)
        assert replica.exchange == pytest.approx(sent / 300e9)
    whole = prediction("train.global_batch=64")  # 16 and 16
    assert whole.exchange == pytest.approx(ELEMENTS / 2 / 2 * 2 * 4 / 300e9)
