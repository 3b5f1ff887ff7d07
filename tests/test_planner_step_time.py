"""Step times: by hand, measured, and what does not fit."""

import numpy as np
import pytest

from ntp.plan import make_plan
from ntp.planner.memory import estimate
from ntp.planner.plans import Plans
from ntp.planner.step_time import interpolate, needed_gib, read_table, step_times
from ntp.planner.study import Job, Step, StudyError
from ntp.planner.work import heaviest_rank, microbatch_time
from tests.studies import MODEL, job, study_of

LLAMA70 = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def times(step=None, **fields):
    study = study_of(job=job(pp=1, dp=2, **fields))
    return step_times(
        Step.model_validate(step or {}, strict=False), study.job, Plans(study.training_config())
    )


def test_the_heaviest_rank_counts_whole_units():
    study = study_of(job=job(dp=2, tp=8, pp=1, batch={"seq_len": 4096, "global_batch": 8}, model=LLAMA70))
    plans = Plans(study.training_config())
    whole = heaviest_rank(study.job, plans, 8)
    head_dim, ffn = 128, 28672 // 8
    layer = 8192 * ((8 + 2) * head_dim + 8 * head_dim + 3 * ffn)  # qkv and o of one KV group, gate, up, down
    vocab = 126 * 128 * 8192  # 1002 blocks over 8 ranks: some have 126
    assert (whole.macs, whole.elements, whole.heads) == (80 * layer + vocab, 80 * layer + 2 * vocab, 8)
    damaged = heaviest_rank(study.job, plans, 7)
    assert damaged.heads == 16  # 8 KV groups on 7 ranks: one has two
    assert whole.macs < damaged.macs < whole.macs * 8 / 7 * 1.2


BATCH = {"seq_len": 4096, "global_batch": 8}


def study_70b(**fields):
    return study_of(job=job(**{"dp": 2, "tp": 8, "pp": 1, "batch": BATCH, "model": LLAMA70, **fields}))


def test_analytic_times_of_a_70b_layer_stack_by_hand():
    study = study_70b()
    step, plans = (
        Step.model_validate({"gpu": {"memory_gib": 1000.0}}, strict=False),
        Plans(study.training_config()),
    )
    found = step_times(step, study.job, plans)
    rank = heaviest_rank(study.job, plans, 8)
    gemm = 6 * 4096 * rank.macs / (989e12 * 0.63)
    scores = 80 * 4 * 4096 * 4096 / 2 * 128 * 8
    attention = scores / (989e12 * 0.5) + 2.5 * scores / (989e12 * 0.43)
    sums = (80 * 4 + 2) * 7 / 8 * 4096 * 8192 * (4 + 2) / 175e9
    norms, ffn, q, kv, vocab = 36 * 8192, 3584, 1024, 128, 126 * 128
    row_norms = 2 * (q + (q + 2 * kv))
    layer = norms + 4 * 6 * 8192 + 18 * ffn + 8 * (q + kv) + row_norms
    pointwise = (4096 * (80 * layer + 8 * vocab) + 8 * rank.elements) / 3000e9
    assert found.microbatch[8] == pytest.approx(gemm + attention + sums + pointwise, rel=1e-6)
    sent = rank.elements / 2 * 2 * 4  # a float32 gradient for two copies of the state, so nothing comes back
    groups = rank.elements * (4 * 4 + 3 * 12)  # four in a replica, each zeroed, three additions
    update = groups + rank.elements * (46 + 12) + 2 * sent
    assert found.exchange[8] == pytest.approx(sent / 50e9 + update / 3000e9, rel=1e-6)


def test_recomputation_costs_forward_passes():
    def parts(recompute):
        study = study_70b(batch={**BATCH, "recompute": recompute})
        rank = heaviest_rank(study.job, Plans(study.training_config()), 8)
        return microbatch_time(Step(), study.job, rank, 8)

    none, attention, block = parts("none"), parts("attention"), parts("block")
    pointwise = parts("pointwise")
    assert (pointwise.products, pointwise.attention) == (none.products, none.attention)
    assert none.pointwise < pointwise.pointwise < none.pointwise * 1.3
    assert block.products == pytest.approx(none.products * 4 / 3)
    assert attention.products == none.products
    assert none.attention < attention.attention == block.attention


def test_memory_is_that_of_the_trainers_own_estimate():
    study = study_70b()
    config = study.training_config()
    plans = Plans(config)
    for degree in (8, 7, 3):
        ranks = estimate(config, make_plan(config, range(degree, 8)))
        worst = max(rank.total for rank in ranks if rank.rank < degree)
        assert needed_gib(study.job, plans, degree) == worst / 2**30


def test_a_stage_holds_its_layers_and_the_activations_of_what_is_under_way():
    whole, halved = study_70b(), study_70b(pp=2)
    one = needed_gib(whole.job, Plans(whole.training_config()), 8)
    two = needed_gib(halved.job, Plans(halved.training_config()), 8)
    assert one / 2 < two < one
    single = study_70b(pp=2, batch={**BATCH, "global_batch": 2})  # one microbatch a replica fills no pipeline
    assert needed_gib(single.job, Plans(single.training_config()), 8) < two


def test_degrees_that_do_not_fit_into_memory_cannot_run():
    study = study_70b()
    plans = Plans(study.training_config())
    limit = (needed_gib(study.job, plans, 6) + needed_gib(study.job, plans, 5)) / 2
    step = Step.model_validate({"gpu": {"memory_gib": limit}}, strict=False)
    found = step_times(step, study.job, plans)
    assert found.usable.tolist() == [False] * 6 + [True] * 3
    assert "GiB" in found.why_not[1]
    with pytest.raises(StudyError, match="tp 8 cannot run at all: needs"):
        step_times(Step.model_validate({"gpu": {"memory_gib": 1.0}}, strict=False), study.job, plans)


def test_proportional_times_and_local_batches():
    found = times({"times": "proportional"})
    assert found.microbatch[1:].tolist() == [4, 2, 4 / 3, 1]
    assert found.local_batch(8, np.ones(5)).tolist() == [0, 2, 4, 6, 8]
    assert found.local_batch(8, np.array([1, 1, 1, 4 / 3, 1])).tolist() == [0, 2, 4, 8, 8]
    assert found.compute(np.array([4, 3, 0]), np.array([8, 3, 0])).tolist() == [8, 4, 0]


def test_degrees_under_the_minimum_cannot_run():
    assert times({"times": "proportional"}, min_degree=3).usable.tolist() == [False, False, False, True, True]


def test_a_measured_table_is_used_and_lies_on_a_line_over_the_inverse_degree(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("degree,microbatch_s,exchange_s\n4,1.0,0.5\n2,2.0,1.0\n")
    found = times({"times": "table", "table": str(path)})
    assert found.microbatch[2:].tolist() == pytest.approx([2, 4 / 3, 1])
    assert found.exchange[2:].tolist() == pytest.approx([1, 2 / 3, 0.5])
    assert "outside" in found.why_not[1]
    assert interpolate({4: (1.0, 0.0), 3: (9.0, 0.0)}, 3) == (9.0, 0.0)


HEAD = "degree,microbatch_s,exchange_s\n"
BAD = [
    ("degree,ms\n4,1\n", "line 1", "ms"),
    (HEAD + "4,fast,0\n", "line 2", "'fast'"),
    (HEAD + "4,0,0\n", "line 2", "microbatch_s 0"),
    (HEAD + "4,-1,0\n", "line 2", "'-1'"),
    (HEAD + "4,inf,0\n", "line 2", "'inf'"),
    (HEAD + "5,1,0\n", "line 2", "degree 5"),
    (HEAD + "2.5,1,0\n", "line 2", "degree 2.5"),
    (HEAD + "4,1,0\n4,1,0\n", "line 3", "twice"),
    (HEAD + "2,1,0\n", "degree 4", "table.csv"),
]


@pytest.mark.parametrize(("text", "place", "value"), BAD, ids=[f"{value}" for *_, value in BAD])
def test_a_bad_table_is_refused_with_line_and_value(tmp_path, text, place, value):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(StudyError) as error:
        read_table(str(path), 4)
    assert place in str(error.value)
    assert value in str(error.value)


def test_plans_are_asked_once():
    study = study_of()
    plans = Plans(study.training_config())
    for _ in range(3):
        assert plans.microbatches_of((4, 4, 3, 0)) == plans.microbatches_of((4, 4, 3, 0))
        assert sum(plans.microbatches_of((4, 4, 3, 0))) == 32
        plans.units_at(3)
    assert plans.calls == 2


def test_the_job_of_a_study_is_a_job_of_the_trainer():
    fields = job(model=MODEL)
    assert study_of(job=fields).training_config().parallel.dp == Job.model_validate(fields, strict=False).dp
