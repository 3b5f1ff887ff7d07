"""Step times: by hand, measured, and what does not fit."""

import numpy as np
import pytest

from ntp.planner.plans import Plans
from ntp.planner.step_time import heaviest_rank, interpolate, read_table, step_times
from ntp.planner.study import Job, Step, StudyError
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


def test_analytic_times_of_a_70b_layer_stack_by_hand():
    study = study_of(job=job(dp=2, tp=8, pp=1, batch={"seq_len": 4096, "global_batch": 8}, model=LLAMA70))
    step = Step.model_validate({"gpu": {"memory_gib": 1000.0}}, strict=False)
    found = step_times(step, study.job, Plans(study.training_config()))
    rank = heaviest_rank(study.job, Plans(study.training_config()), 8)
    gemm = 6 * 4096 * rank.macs / (989e12 * 0.6)
    attention = 80 * 3.5 * (4 * 4096 * 4096 / 2 * 128 * 8) / (989e12 * 0.4)
    sums = 80 * 4 * 2 * 7 / 8 * 4096 * 8192 * 4 / 450e9
    assert found.microbatch[8] == pytest.approx(gemm + attention + sums, rel=1e-6)
    assert found.exchange[8] == pytest.approx(rank.elements * 8 / 2 / 50e9, rel=1e-6)


def test_degrees_that_do_not_fit_into_memory_cannot_run():
    study = study_of(job=job(dp=2, tp=8, pp=1, batch={"seq_len": 4096, "global_batch": 8}, model=LLAMA70))
    plans = Plans(study.training_config())
    step = Step.model_validate({"gpu": {"memory_gib": 180.0}}, strict=False)
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
