"""The first real cause among the exits of a failed job."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ntp_launcher.outcome import Exit, describe, explain, first_cause, last_error_line

PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1234"
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ncclRemoteError"


@pytest.mark.parametrize(
    ("cause", "consequences"),
    [
        (Exit(5, -signal.SIGKILL, order=3), [Exit(1, 1, PEER), Exit(2, 1, STORE, order=1)]),
        (Exit(5, -signal.SIGSEGV, order=3), [Exit(1, 1, "ValueError: x")]),
        (Exit(5, 1, "ValueError: bad shape", order=3), [Exit(1, 1, PEER), Exit(2, 0, order=1)]),
        (Exit(5, 1, "torch.OutOfMemoryError: CUDA out of memory", order=2), [Exit(1, 1, NCCL)]),
        (Exit(5, 1, "MemoryError", order=2), [Exit(1, -signal.SIGABRT, PEER)]),
        (Exit(5, 0, order=2), [Exit(1, 1, PEER), Exit(2, 1, STORE, order=1)]),
        (Exit(5, 1, PEER, order=0), [Exit(1, 1, STORE, order=1)]),
        (Exit(5, 7, order=4), [Exit(1, 1, PEER)]),
    ],
)
def test_a_cause_is_told_from_its_consequences(cause: Exit, consequences: list[Exit]) -> None:
    assert first_cause([*consequences, cause]) == cause
    assert first_cause([cause, *consequences]) == cause


def test_a_job_without_a_failed_exit_has_no_cause() -> None:
    assert first_cause([]) is None
    assert first_cause([Exit(0, 0), Exit(1, 0)]) is None
    assert explain([]) == ""


exits = st.builds(
    Exit,
    rank=st.integers(0, 7),
    code=st.sampled_from([0, 1, 3, -9, -6, -11]),
    error=st.sampled_from(["", PEER, "ValueError: x"]),
    order=st.integers(0, 7),
)


@given(st.lists(exits, unique_by=lambda exit: exit.rank), st.randoms())
def test_the_cause_does_not_depend_on_which_agent_tells_first(told: list[Exit], random) -> None:
    shuffled = random.sample(told, len(told))
    assert first_cause(told) == first_cause(shuffled)
    assert [Exit(**exit.to_json()) for exit in told] == told


def test_a_cause_is_one_line_with_rank_and_code_or_signal() -> None:
    assert describe(Exit(3, -9)) == "rank 3 was killed by SIGKILL"
    assert describe(Exit(3, -35)) == "rank 3 was killed by signal 35"
    assert describe(Exit(3, 1, "ValueError: x")) == "rank 3 exited with code 1: ValueError: x"
    assert describe(Exit(3, 4)) == "rank 3 exited with code 4 and wrote no error"
    assert describe(Exit(3, 0)) == "rank 3 exited with code 0 before the end of the run"


def test_what_an_agent_says_of_itself_comes_first_and_silence_is_counted() -> None:
    assert explain([Exit(1, 1, PEER)], ["the agent of node 0 was stopped by SIGTERM"]).startswith("the agent")
    assert explain([Exit(1, 1, "ValueError: x")], silent=2).endswith("(2 other agents gone without a word)")


def test_the_error_line_is_where_the_last_traceback_ends() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "KeyError: 'a'",
        "During handling of the above exception, another exception occurred:",
        "ntp.errors.DataError: no such file",
        "[W1128 ProcessGroup.cpp] destroy_process_group() was not called",
        "",
    ]
    assert last_error_line(lines) == "ntp.errors.DataError: no such file"
    assert (
        last_error_line(["[rank1]: ValueError: x", "[rank1]:     Error = 3", "[W1128 c10d] bye"])
        == "ValueError: x"
    )
    assert last_error_line(["just words", ""]) == "just words"
    assert last_error_line([]) == ""
    assert len(last_error_line(["ValueError: " + "x" * 999])) == 300
