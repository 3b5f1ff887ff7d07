"""Outages: drawn, read and counted."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp.planner.outages import draw, merge, read_trace, scattered, timeline
from ntp.planner.study import Failures, StudyError

HORIZON = 20

intervals = st.lists(st.tuples(st.integers(0, 7), st.integers(-5, 25), st.integers(1, 15)), max_size=25)


def down(found, gpus=8):
    """GPU x hour, from the intervals themselves."""
    table = np.zeros((gpus, HORIZON), bool)
    for gpu, start, length in found:
        table[gpu, max(start, 0) : max(start + length, 0)] = True
    return table


def merged(found):
    gpu, start, length = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return merge(gpu, start.astype(float), (start + length).astype(float), HORIZON)


@settings(max_examples=200, deadline=None)
@given(intervals)
def test_a_gpu_is_down_exactly_while_some_outage_of_it_lasts(found):
    outages = merged(found)
    pieces = [
        (g, int(a), int(b - a)) for g, a, b in zip(outages.gpu, outages.start, outages.stop, strict=True)
    ]
    assert np.array_equal(down(pieces), down(found))
    assert len(pieces) == np.diff(down(found), axis=1, prepend=False).sum(axis=None, where=down(found))


@settings(max_examples=100, deadline=None)
@given(intervals, st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_the_timeline_counts_the_gpus_that_are_down_at_every_moment(found, tp, elements):
    slots = 8 // tp
    line = timeline(merged(found), slots, tp, HORIZON)
    assert line.hours.sum() == HORIZON
    counts = np.concatenate([chunk for _, chunk in line.chunks(elements)])
    expected = down(found).reshape(slots, tp, HORIZON).sum(axis=1)
    for hour in range(HORIZON):
        place = np.searchsorted(line.time, hour, side="right") - 1
        assert np.array_equal(counts[place], expected[:, hour])


def test_a_repaired_gpu_counts_again():
    line = timeline(merged([(3, 2, 4)]), 2, 4, HORIZON)
    ((_, counts),) = line.chunks()
    assert counts[:, 0].tolist() == [0, 1, 0]
    assert line.time.tolist() == [0, 2, 6]
    fails, repairs = line.changes(2)
    assert fails.tolist() == [False, True, False]
    assert repairs.tolist() == [False, False, True]


def test_changes_of_slots_that_a_policy_does_not_have_are_left_out():
    line = timeline(merged([(6, 2, 4)]), 2, 4, HORIZON)
    assert line.changes(2)[0].any()
    assert not line.changes(1)[0].any()


def test_drawn_failures_have_the_rate_the_radius_and_the_repair_time_that_were_asked_for():
    failures = Failures.model_validate(
        {"kinds": [{"name": "a", "per_gpu_hour": 1e-5, "blast_radius": 4, "repair_hours": [10.0]}]},
        strict=False,
    )
    outages = draw(failures, 4000, 1000.0, np.random.default_rng(0))
    events = len(outages.gpu) / 4
    assert abs(events - 40) < 3 * 40**0.5
    whole = outages.stop < 1000
    assert np.allclose((outages.stop - outages.start)[whole], 10)
    blocks = outages.gpu.reshape(-1)[np.lexsort((outages.gpu, outages.start))].reshape(-1, 4)
    assert np.array_equal(blocks, blocks[:, :1] // 4 * 4 + np.arange(4))


@pytest.mark.parametrize(("start", "share"), [("healthy", 0.0), ("steady", 0.048)])
def test_a_steady_start_has_the_failures_from_before(start, share):
    failures = Failures.model_validate(
        {"start": start, "kinds": [{"name": "a", "per_gpu_hour": 1e-3, "repair_hours": [50.0]}]}, strict=False
    )
    outages = draw(failures, 10000, 100.0, np.random.default_rng(0))
    assert np.isclose((outages.start == 0).mean() * len(outages.gpu) / 10000, share, atol=0.01)


def test_scattered_failures_are_whole_blocks():
    found = scattered(12, 64, 4, np.random.default_rng(0))
    assert len(set(found.tolist())) == 12
    assert set((found // 4 * 4).tolist()) <= set(found.tolist())


HEAD = "time,domain,gpu,event\n"


def trace(tmp_path: Path, text: str):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path, domains=2, domain_size=4, horizon=HORIZON)


def test_a_trace_says_when_a_gpu_is_down(tmp_path):
    found = trace(tmp_path, HEAD + "1,0,3,fail\n2.5, 1,0,fail\n\n4,0,3,repair\n30,0,0,fail\n")
    assert list(zip(found.gpu, found.start, found.stop, strict=True)) == [(3, 1, 4), (4, 2.5, HORIZON)]


def test_a_trace_without_events_is_a_healthy_cluster(tmp_path):
    assert not len(trace(tmp_path, HEAD).gpu)


BAD_TRACES = [
    ("", "line 1", "header"),
    ("time;domain;gpu;event\n", "line 1", "time;domain"),
    (HEAD + "1,0,0,fail\nsoon,0,1,fail\n", "line 3", "'soon'"),
    (HEAD + "nan,0,1,fail\n", "line 2", "'nan'"),
    (HEAD + "-1,0,1,fail\n", "line 2", "'-1'"),
    (HEAD + "5,0,0,fail\n4,0,1,fail\n", "line 3", "time 4"),
    (HEAD + "5,2,0,fail\n", "line 2", "domain 2"),
    (HEAD + "5,0,4,fail\n", "line 2", "gpu 4"),
    (HEAD + "5,0,-1,fail\n", "line 2", "'-1'"),
    (HEAD + "5,0,1.5,fail\n", "line 2", "'1.5'"),
    (HEAD + "5,0,1,explode\n", "line 2", "'explode'"),
    (HEAD + "5,0,1\n", "line 2", "['5', '0', '1']"),
    (HEAD + "5,0,1,fail\n6,0,1,fail\n", "line 3", "gpu 1 failed already"),
    (HEAD + "5,0,1,repair\n", "line 2", "gpu 1 is not failed"),
]


@pytest.mark.parametrize(("text", "line", "value"), BAD_TRACES, ids=[value for *_, value in BAD_TRACES])
def test_a_bad_trace_is_refused_with_line_and_value(tmp_path, text, line, value):
    with pytest.raises(StudyError) as error:
        trace(tmp_path, text)
    assert line in str(error.value)
    assert value in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trace_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(StudyError, match="nowhere"):
        read_trace(tmp_path / "nowhere.csv", 1, 1, 1)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StudyError, match=r"binary\.csv"):
        read_trace(tmp_path / "binary.csv", 1, 1, 1)
