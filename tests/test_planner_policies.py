"""Policies: capacity is never created, and they are ordered as theory says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp.plan import make_plan
from ntp.planner.policies import prepare, replica_degrees, throughput
from tests.studies import job, policy, row, study_of

SHRINK = prepare(study_of())
CONSTANT = prepare(study_of(job=job(batch_rule="constant")))
FINE = prepare(
    study_of(
        job=job(pp=1, batch={"seq_len": 64, "global_batch": 512}), cluster={"gpus": 16, "domain_size": 4}
    )
)

damage = st.lists(st.lists(st.integers(0, 4), min_size=12, max_size=12), min_size=1, max_size=6).map(
    lambda rows: np.array(rows, np.int16)
)
DROP, FREE = policy(degrees="whole"), policy()
PACKED = {
    degrees: policy(degrees=degrees, pack=True) for degrees in ("whole", "uniform", "free", (3,), (3, 2))
}
BOOST = {"speed": {3: 1.34, 2: 2.0}}


@settings(max_examples=100, deadline=None)
@given(damage)
@pytest.mark.parametrize("setting", [SHRINK, CONSTANT, FINE], ids=["shrink", "constant", "fine"])
def test_policies_are_ordered_and_none_beats_the_healthy_job(setting, failed):
    failed = failed[:, : setting.study.job_slots]
    rate = {name: throughput(setting, each, failed) for name, each in PACKED.items()}
    in_place = throughput(setting, FREE, failed)
    assert (rate["whole"] <= rate["uniform"] + 1e-12).all()
    assert (in_place <= rate["free"] + 1e-12).all()
    assert (throughput(setting, DROP, failed) <= rate["whole"] + 1e-12).all()
    boosted = policy(pack=True, boost=BOOST)
    assert (rate["free"] <= throughput(setting, boosted, failed) + 1e-12).all()
    assert all(((value >= 0) & (value <= 1 + 1e-12)).all() for value in [*rate.values(), in_place])
    if setting.study.job.batch_rule == "shrink":
        assert (rate["whole"] <= rate[3,] + 1e-12).all()
        assert (rate[3,] <= rate[3, 2] + 1e-12).all()
        assert (rate[3, 2] <= rate["free"] + 1e-12).all()


@settings(max_examples=100, deadline=None)
@given(damage)
@pytest.mark.parametrize("setting", [SHRINK, CONSTANT, FINE], ids=["shrink", "constant", "fine"])
def test_capacity_is_never_created(setting, failed):
    failed = failed[:, : setting.study.job_slots]
    live = 1 - failed.sum(axis=1) / setting.study.cluster.gpus
    if setting is CONSTANT:  # fewer replicas have more microbatches each and fill their pipelines better
        live *= (8 + 2 - 1) / 8
    for each in (*PACKED.values(), DROP, FREE):
        assert (throughput(setting, each, failed) <= live + 1e-12).all()


@settings(max_examples=50, deadline=None)
@given(damage)
@pytest.mark.parametrize("setting", [SHRINK, CONSTANT], ids=["shrink", "constant"])
def test_more_spares_and_more_boosted_domains_never_hurt(setting, failed):
    for each in (*PACKED.values(), DROP, FREE):
        rates = [throughput(setting, each, failed, spares) for spares in range(3)]
        assert (np.diff(rates, axis=0) >= -1e-12).all()
    boosts = [policy(pack=True, boost={**BOOST, "max_domains": limit}) for limit in (0, 1, 2, 8, None)]
    rates = [throughput(setting, each, failed[:, :8]) for each in boosts]
    assert (np.diff(rates, axis=0) >= -1e-12).all()
    assert np.array_equal(rates[0], throughput(setting, PACKED["free"], failed[:, :8]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_packing_is_the_best_of_all_ways_to_form_replicas(failed):
    setting = prepare(
        study_of(
            job=job(dp=3, batch={"seq_len": 64, "global_batch": 24}), cluster={"gpus": 24, "domain_size": 4}
        )
    )
    orders = np.array(list(itertools.permutations(failed)), np.int16)
    for degrees in ("whole", "free", (2,)):
        best = throughput(setting, policy(degrees=degrees), orders).max()
        assert throughput(setting, policy(degrees=degrees, pack=True), row(*failed))[0] == pytest.approx(best)


def test_all_stages_of_a_replica_take_the_degree_of_the_most_damaged_one():
    failed = row(0, 1, 2, 0, 0, 0, 3, 1)
    assert replica_degrees(SHRINK.study, FREE, failed).tolist() == [[3, 2, 4, 1]]
    assert replica_degrees(SHRINK.study, PACKED["free"], failed).tolist() == [[4, 4, 3, 1]]


def test_spares_stand_in_for_whole_replicas_in_place_and_form_further_ones_when_packed():
    failed = row(1, 1, 1, 0, 0, 0, 0, 0, 0, 0)  # two damaged replicas, one spare domain of two slots
    assert replica_degrees(SHRINK.study, FREE, failed).tolist() == [[3, 4, 4, 4]]
    assert replica_degrees(SHRINK.study, PACKED["free"], failed).tolist() == [[4, 4, 4, 3, 3]]
    failed[0, 8:] = 1
    assert replica_degrees(SHRINK.study, FREE, failed).tolist() == [[3, 3, 4, 4]]


def test_a_boosted_replica_needs_power_in_all_its_domains():
    failed = row(1, 0, 0, 0, 1, 0, 0, 0)
    rates = [
        throughput(SHRINK, policy(boost={**BOOST, "max_domains": limit}), failed)[0] for limit in (0, 1, 2)
    ]  # a replica of two stages fills one domain of two slots
    assert rates == [26 / 32, 29 / 32, 1.0]


def test_a_shrinking_batch_counts_the_pipeline_fill():
    """8 microbatches and 1 of fill take 9; at degree 3 of 4 that is time for 6.75, so for 5 and the fill."""
    assert throughput(SHRINK, FREE, row(1, 0, 0, 0, 0, 0, 0, 0))[0] == (3 * 8 + 5) / 32


def test_a_constant_batch_is_spread_by_the_plan_of_the_launcher():
    setting = prepare(study_of(job=job(pp=1, batch_rule="constant"), cluster={"gpus": 16, "domain_size": 4}))
    plan = make_plan(setting.study.training_config(), {1, 2, 9})
    slowest = max(len(replica.microbatches) / replica.degree for replica in plan.replicas)
    rate = throughput(setting, FREE, row(2, 0, 1, 0))[0]
    assert rate == pytest.approx(8 / 4 / slowest)


def test_nothing_left_is_no_throughput():
    failed = np.full((2, 8), 4, np.int16)
    for setting in (SHRINK, CONSTANT):
        assert throughput(setting, FREE, failed).tolist() == [0, 0]
        assert throughput(setting, PACKED["uniform"], failed).tolist() == [0, 0]
