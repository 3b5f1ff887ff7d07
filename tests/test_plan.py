"""The plan: who owns what, for any set of failures."""

import gc
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp.errors import PlanError
from ntp.plan import make_plan
from ntp.units import UnitKind, covers_once
from tests.shapes import LLAMA, ODD, make_config


def degrees(plan):
    return {replica.index: replica.degree for replica in plan.replicas}


def config(dp=2, tp=4, model=LLAMA, **parallel):
    return make_config(model, parallel={"dp": dp, "tp": tp, **parallel})


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        ((), {0: 4, 1: 4}),
        ((3,), {0: 3, 1: 4}),
        ((3, 5), {0: 3, 1: 3}),
        ((1, 2, 3), {0: 1, 1: 4}),
        ((4, 5, 6, 7), {0: 4}),
    ],
)
def test_each_replica_keeps_the_degree_it_can(failed, expected):
    assert degrees(make_plan(config(), failed)) == expected


def test_live_slots_keep_their_order():
    plan = make_plan(
        config(
            dp=1,
            tp=8,
            model={**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128},
        ),
        {2, 5},
    )
    assert plan.replicas[0].members == (0, 1, 3, 4, 6, 7)
    plan = make_plan(
        config(dp=1, tp=8, model={**LLAMA, "num_key_value_heads": 8, "intermediate_size": 128}), {1, 4, 6}
    )
    assert plan.replicas[0].members == (0, 2, 3, 5, 7)


EIGHT = {**LLAMA, "num_key_value_heads": 8, "intermediate_size": 128}


@pytest.mark.parametrize(
    ("failed", "members", "standbys"),
    [
        ({2, 5, 9}, [(0, 1, 3, 4, 6, 7), (8, 10, 11, 12, 13, 14)], (15,)),
        ({2, 5, 9, 11}, [(0, 1, 3, 4, 6, 7), (8, 10, 12, 13, 14, 15)], ()),
        (set(), [tuple(range(8)), tuple(range(8, 16))], ()),
    ],
)
def test_uniform_policy_switches_the_last_surplus_ranks_off(failed, members, standbys):
    plan = make_plan(config(tp=8, model=EIGHT, policy="uniform"), failed)
    assert [replica.members for replica in plan.replicas] == members
    assert plan.standbys == standbys


def test_free_policy_keeps_every_healthy_rank_working():
    plan = make_plan(config(tp=8, model=EIGHT), {2, 5, 9})
    assert plan.workers == tuple(rank for rank in range(16) if rank not in {2, 5, 9})
    assert len(plan.workers) == 13
    assert plan.standbys == ()


def test_a_standby_takes_over_the_failed_position_of_the_neediest_replica():
    plan = make_plan(config(standbys=2), {3, 5, 6})
    assert [replica.members for replica in plan.replicas] == [(0, 1, 2, 9), (4, 8, 7)]
    assert make_plan(config(standbys=2), {3, 9}).replicas[0].members == (0, 1, 2, 8)
    assert make_plan(config(standbys=2), {8}).standbys == (9,)


def test_a_replica_under_the_minimum_degree_is_dropped_with_its_reason():
    plan = make_plan(config(min_degree=3), {2, 3})
    assert degrees(plan) == {1: 4}
    assert plan.standbys == (0, 1)
    assert "min_degree" in plan.dropped[0][1]
    assert plan.replicas[0].microbatches == range(8)


def test_no_replica_left_is_refused():
    with pytest.raises(PlanError, match="no rank left"):
        make_plan(config(), set(range(8)))


def test_more_ranks_than_units_are_refused():
    assert [len(r) for r in make_plan(config(dp=1, tp=5)).replicas[0].owners[UnitKind.KV]] == [1, 1, 1, 1, 0]
    with pytest.raises(PlanError, match=r"tp=10 .* 9 units"):
        make_plan(config(tp=10))


def test_topology_of_a_half_replica_beside_a_whole_one():
    assert len(make_plan(config(tp=8, model=EIGHT), {1, 3, 5, 7}).world) == 12


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.booleans(), st.data())
def test_every_unit_is_owned_once_and_every_microbatch_computed_once(dp, tp, standbys, uniform, data):
    batch = data.draw(st.integers(1, 24))
    plan_of = make_config(
        ODD,
        parallel={"dp": dp, "tp": tp, "standbys": standbys, "policy": "uniform" if uniform else "free"},
        train={"global_batch": batch, "grad_group": data.draw(st.integers(1, 5))},
    )
    world = dp * tp + standbys
    failed = data.draw(st.sets(st.integers(0, world - 1), max_size=world - 1))
    try:
        plan = make_plan(plan_of, failed)
    except PlanError:
        assert set(range(dp * tp)) <= failed
        return
    for replica in plan.replicas:
        assert all(covers_once(replica.owners[kind], plan.units[kind]) for kind in UnitKind)
    assert [m for replica in plan.replicas for m in replica.microbatches] == list(range(batch))
    assert [m for g in range(plan.groups) for m in plan.microbatches_of(g)] == list(range(batch))
    assert set(plan.world) | set(plan.failed) == set(range(world))
    assert not set(plan.world) & failed
    if uniform:
        assert len(set(degrees(plan).values())) == 1


def test_planning_a_thousand_failure_sets_of_512_ranks_is_fast():
    big = make_config(
        {**EIGHT, "intermediate_size": 14336, "ffn_unit": 128, "vocab_size": 128256, "vocab_unit": 128},
        parallel={"dp": 64, "tp": 8},
        train={"global_batch": 1024},
    )
    draw = random.Random(0)
    slowest = 0.0
    gc.disable()  # a collection of the test process's own heap takes longer than a plan
    for _ in range(1000):
        failed = set(draw.sample(range(512), draw.randrange(40)))
        start = time.process_time()
        make_plan(big, failed)
        slowest = max(slowest, time.process_time() - start)
    gc.enable()
    assert slowest < 0.05
