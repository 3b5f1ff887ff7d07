"""Groups by measured speed: the best shares for the times that were seen, and the same bits as by degree."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ntp import balance
from ntp.balance import Measurement, decide, is_worth_measuring
from ntp.data import datasets_of
from ntp.life import _Era
from ntp.meter import Meter
from ntp.plan import make_plan
from ntp.protocol import Phase, metrics_key
from ntp.stopwatch import Stopwatch
from ntp.testing import simulate
from ntp.trainer import StepResult, Trainer
from tests import test_recovery
from tests.shapes import LLAMA, make_config
from tests.training import train

CPU = torch.device("cpu")
AMPLE = 1 << 20
SHALLOW = {**LLAMA, "num_hidden_layers": 1}


def config_of(parallel, **settings):
    return make_config(parallel=parallel, train={"steps": 4, **settings})


def told(plan, times, steps=3):
    """Every worker's microseconds: `times` by degree, for a microbatch."""
    each = [times[r.degree] * len(r.microbatches) for r in plan.replicas for _ in r.members]
    return [each] * steps


def longest(shares, plan, times):
    return max(len(share) * times[r.degree] for share, r in zip(shares, plan.replicas, strict=True))


@st.composite
def damaged(draw):
    """A plan of two to four replicas of which at least one has lost ranks, and times of each degree."""
    dp = draw(st.integers(2, 4))
    failed = draw(st.sets(st.integers(0, 4 * dp - 1), min_size=1, max_size=6))
    batch = draw(st.integers(dp + 1, 40))
    plan = make_plan(config_of({"dp": dp, "tp": 4}, global_batch=batch), failed)
    assume(is_worth_measuring(plan) and all(replica.groups for replica in plan.replicas))
    return plan, {degree: draw(st.integers(1, 500)) for degree in range(1, 5)}


@given(damaged())
def test_whole_groups_are_dealt_out_once_and_nobody_could_finish_earlier(case):
    plan, times = case
    found = decide(plan, told(plan, times), [AMPLE] * len(plan.workers))
    assert [group for share in found.shares for group in share] == list(range(plan.groups))
    by_replica = [times[replica.degree] for replica in plan.replicas]
    ends = sorted(count * time for time in by_replica for count in range(plan.groups + 1))
    soonest = next(end for end in ends if sum(end // time for time in by_replica) >= plan.groups)
    assert longest(found.shares, plan, times) == soonest
    by_degree = [replica.groups for replica in plan.replicas]
    if found.kept:
        assert list(found.shares) == by_degree
    else:
        assert longest(found.shares, plan, times) < longest(by_degree, plan, times)


@given(damaged())
def test_a_plan_with_other_shares_owns_the_same(case):
    plan, times = case
    found = decide(plan, told(plan, times), [AMPLE] * len(plan.workers))
    moved = plan.with_shares(found.shares)
    assert [m for replica in moved.replicas for m in replica.microbatches] == list(range(plan.microbatches))
    for replica in moved.replicas:
        assert replica.microbatches == range(
            moved.microbatches_of(replica.groups[0])[0] if replica.groups else replica.microbatches.start,
            moved.microbatches_of(replica.groups[-1])[-1] + 1
            if replica.groups
            else replica.microbatches.stop,
        )
    assert moved.with_shares([replica.groups for replica in plan.replicas]) == plan


def test_every_worker_hears_the_same_outcome():
    plan = make_plan(config_of({"dp": 2, "tp": 4}, global_batch=28), {7})
    parts = {rank: Measurement(plan, rank) for rank in plan.workers}
    outcomes = []
    for step in range(1, 9):
        figures = [parts[rank].figures(100 * plan.replica_of(rank).degree, step) for rank in plan.workers]
        heard = [part.hear([sum(column) for column in zip(*figures, strict=True)]) for part in parts.values()]
        outcomes.append(heard[0])
        assert heard == [heard[0]] * 7
        assert not figures[0] or step > balance.UNMEASURED_STEPS + 1, "a step that compiles does not count"
    assert [outcome is not None for outcome in outcomes] == [False] * 7 + [True]
    assert outcomes[-1].times == {4: 25_000, 3: 25_000}
    assert outcomes[-1].to_json() == {
        "ns_per_microbatch": {"4": 25_000, "3": 25_000},
        "groups": {"0": 14, "1": 14},
        "kept": "",
    }
    assert str(outcomes[-1]) == (
        "by measured speed: 14 groups at degree 4 (0.025 ms a microbatch), "
        "14 groups at degree 3 (0.025 ms a microbatch)"
    )


def test_one_slow_step_or_rank_does_not_decide():
    plan = make_plan(config_of({"dp": 2, "tp": 4}, global_batch=28), {7})
    steps = [list(step) for step in told(plan, {4: 30, 3: 40}, 5)]
    steps[2] = [time * 50 for time in steps[2]]
    assert decide(plan, steps, [AMPLE] * 7).times == {4: 30_000, 3: 40_000}


@pytest.mark.parametrize(
    ("batch", "times", "spare", "kept"),
    [
        (28, {4: 30, 3: 40}, AMPLE, "nothing to gain"),
        (28, {4: 30, 3: 30}, AMPLE, ""),
        (28, {4: 30, 3: 50}, 0, "more partial sums would not fit"),
    ],
)
def test_shares_stay_by_degree_where_others_are_no_better_or_do_not_fit(batch, times, spare, kept):
    plan = make_plan(config_of({"dp": 2, "tp": 4}, global_batch=batch), {7})
    found = decide(plan, told(plan, times), [spare] * 7)
    assert found.kept == kept
    assert (found.shares == tuple(replica.groups for replica in plan.replicas)) is bool(kept)


def test_a_degree_without_groups_has_no_speed():
    plan = make_plan(config_of({"dp": 3, "tp": 4}, global_batch=4), {9, 10, 11})
    assert [len(replica.groups) for replica in plan.replicas] == [2, 2, 0]
    found = decide(plan, told(plan, {4: 1, 1: 1}), [AMPLE] * 9)
    assert (found.kept, dict(found.times)) == ("a degree has no groups", {4: 500 * 2})


@pytest.mark.parametrize(
    ("parallel", "failed", "batch", "worth"),
    [
        ({"dp": 2, "tp": 2}, (), 8, False),
        ({"dp": 2, "tp": 2}, (3,), 8, True),
        ({"dp": 2, "tp": 2}, (3,), 2, False),
        ({"dp": 2, "tp": 2, "policy": "uniform"}, (3,), 8, False),
        ({"dp": 2, "tp": 2}, (2, 3), 8, False),
    ],
)
def test_only_different_degrees_with_something_to_deal_out_are_measured(parallel, failed, batch, worth):
    assert is_worth_measuring(make_plan(config_of(parallel, global_batch=batch), failed)) is worth


def test_a_stopwatch_reads_what_lies_between_start_and_stop():
    watch = Stopwatch(CPU)
    assert watch.microseconds() == 0
    watch.start()
    threading.Event().wait(0.02)
    watch.stop()
    assert 20_000 <= watch.microseconds() < 20_000_000


def test_the_outcome_is_recorded_once():
    plan = make_plan(config_of({"dp": 2, "tp": 4}, global_batch=28), {7})
    found = decide(plan, told(plan, {4: 30, 3: 30}), [AMPLE] * 7)
    said, put = [], {}
    job = SimpleNamespace(rank=0, say=said.append)
    control = SimpleNamespace(put=lambda key, text: put.update({key: json.loads(text)}))
    era = _Era(job, control, Meter(None, CPU), plan, None, None, 0.0)
    for step, outcome in ((7, None), (8, found), (9, found)):
        era._post_metrics(StepResult(step, 1.0, 1.0, 1.0, 1), 1.0, None, outcome)
    lines = [put[metrics_key(step)] for step in (7, 8, 9)]
    assert [line.get("balance") for line in lines] == [None, found.to_json(), None]
    assert [line.get("notes") for line in lines] == [None, [str(found)], None]
    assert said == [str(found)]


class FakeStopwatch(Stopwatch):
    """Says that the replica of ranks under 2 takes 1 ms in a step and any other 100, and counts readings."""

    readings = 0

    def microseconds(self):
        FakeStopwatch.readings += 1
        return 1_000 if threading.current_thread().name in ("rank0", "rank1") else 100_000


@pytest.fixture
def soon(monkeypatch):
    """Measured are steps 1 and 2; shares by speed hold from step 4 on."""
    torch.set_num_threads(1)
    monkeypatch.setattr(balance, "UNMEASURED_STEPS", 0)
    monkeypatch.setattr(balance, "MEASURED_STEPS", 2)
    monkeypatch.setattr("ntp.trainer.Stopwatch", FakeStopwatch)
    FakeStopwatch.readings = 0


class Spoil:
    """A watch that counts microbatches by step, and makes the first gradient of one step infinite."""

    def __init__(self, step=0):
        self.bad, self.counts = step, {}

    def enter(self, phase, step):
        pass

    def microbatch(self, step, gradients):
        self.counts[step] = self.counts.get(step, 0) + 1
        if step == self.bad:
            gradients[0], self.bad = float("inf"), 0

    def wants_switch(self):
        return False


def run(config, data, failed, spoiled=0):
    """Results, hashes and microbatches of every step, as the first worker saw them."""
    plan = make_plan(config, failed)

    def body(member):
        watch = Spoil(spoiled if member.rank == plan.workers[-1] else 0)
        trainer = Trainer(config, plan, member.mesh, data, CPU, watch)
        steps = []
        for step in range(1, config.train.steps + 1):
            steps.append((trainer.step(step), trainer.hashes(), trainer.evaluate()))
        return steps, watch.counts, trainer.balance

    return simulate(body, plan)


@pytest.mark.parametrize(
    ("parallel", "failed", "dtype", "overlap"),
    [
        ({"dp": 2, "tp": 2}, (3,), "float32", True),
        ({"dp": 2, "tp": 2}, (3,), "bfloat16", False),
        ({"dp": 3, "tp": 2}, (5,), "float32", True),
    ],
)
def test_shares_that_switch_in_mid_run_change_no_bit_of_any_step(soon, parallel, failed, dtype, overlap):
    def config(rule):
        return make_config(
            SHALLOW,
            parallel={**parallel, "balance": rule, "overlap_exchange": overlap},
            train={"steps": 5, "global_batch": 11, "dtype": dtype, "seq_len": 8},
            data={"held_out": 0.1, "eval_sequences": 3},
        )

    data = datasets_of(config("degree"))
    by_degree = run(config("degree"), data, failed)
    assert FakeStopwatch.readings == 0, "nothing is measured"
    by_speed = run(config("measured"), data, failed)
    assert [steps for steps, _, _ in by_speed.values()] == [steps for steps, _, _ in by_degree.values()]
    counts = by_speed[0][1]
    assert counts[1] == counts[3] == by_degree[0][1][1]
    assert counts[4] == counts[5] > counts[3]
    assert all(found is not None and not found.kept for _, _, found in by_speed.values())
    assert {found for _, _, found in by_degree.values()} == {None}


@pytest.mark.parametrize("spoiled", [2, 3, 4])
def test_a_step_that_is_computed_again_may_have_other_shares(soon, spoiled):
    config = make_config(
        SHALLOW,
        parallel={"dp": 2, "tp": 2},
        train={"steps": 5, "global_batch": 7, "seq_len": 8},
        data={"held_out": 0.1, "eval_sequences": 3},
    )
    data = datasets_of(config)
    plain, again = run(config, data, (3,)), run(config, data, (3,), spoiled)
    assert again[0][0][-1][0].grad_norm == plain[0][0][-1][0].grad_norm
    assert [steps for steps, _, _ in again.values()] == [steps for steps, _, _ in plain.values()]


@pytest.mark.parametrize(("step", "phase"), [(3, Phase.UPDATE), (4, Phase.EXCHANGE), (5, Phase.UPDATE)])
def test_a_loss_after_the_switch_changes_no_bit(soon, monkeypatch, step, phase):
    monkeypatch.setattr(test_recovery, "STEPS", 6)
    train_settings = {"steps": 6, "global_batch": 8, "seq_len": 8}
    config = make_config(SHALLOW, parallel={"dp": 3, "tp": 2}, train=train_settings)
    data = datasets_of(config)
    plan = make_plan(config, {5})
    survivors = test_recovery.run_until_fault(config, plan, data, (3,), step, phase)
    switched = [trainer.balance is not None for trainer in survivors.values()]
    assert all(switched) or step == 3, "where the loss comes during the switch some have not heard"
    later = make_plan(config, {3, 5}, generation=1)
    steps, _, hashes = test_recovery.go_on(config, later, data, survivors)
    unfailed = train(config, data)
    assert hashes == unfailed.hashes
    assert steps == list(unfailed.steps[6 - len(steps) :])
