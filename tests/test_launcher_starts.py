"""Signals to the launcher at bad moments, and the end of its lease while workers are being started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ntp_launcher import crew, signals
from ntp_launcher.agent import STOP_S
from ntp_launcher.crew import Crew, Recipe
from ntp_launcher.events import ProbeDone, Start, WorkerExited
from ntp_launcher.processes import WorkerProcess
from torch.distributed.elastic.multiprocessing.api import SignalException

from ntp.testing.trial import processes_of
from tests.test_launcher_agent import (
    DRIVER,
    ONE_LOSS_ENDS_IT,
    ONE_REPLICA,
    assert_nothing_is_left,
    finish,
    launch,
    seen,
    start,
    two_agents,
    wait,
)

# A signal to the launcher when rank 2's process is there and nobody has written down that it is.
INTERRUPTED = """
import os, signal, sys
from ntp_launcher import crew
from ntp_launcher.cli import main
start_worker = crew.start_worker
def interrupted(rank, *rest):
    worker = start_worker(rank, *rest)
    if rank == 2:
        os.kill(os.getpid(), signal.{name})
    return worker
crew.start_worker = interrupted
sys.exit(main(worker_module="tests.stub_worker"))
"""
# A second signal as soon as the first has been taken, where what it calls first begins.
AGAIN = """
import os, signal, sys
from ntp_launcher.cli import main
from ntp_launcher.leader import Leader
end = Leader.end
def interrupted(*what):
    os.kill(os.getpid(), signal.SIGTERM)
    end(*what)
Leader.end = interrupted
sys.exit(main(worker_module="tests.stub_worker"))
"""
HANG = {f"STUB_{rank}": "hang" for rank in range(4)}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_workers_are_started_ends_everything(name: str, tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, *ONE_REPLICA, driver=INTERRUPTED.format(name=name), **HANG))
    assert code == 128 + signal.Signals[name]
    assert err.removeprefix("rank 0 warns\n") == f"ntp-launch: stopped by {name}\n"  # it may get so far
    wait(lambda: not processes_of(tmp_path), seconds=10)


def test_a_signal_while_workers_are_started_is_told_to_the_other_node(tmp_path: Path) -> None:
    nodes = [("--node-rank", node, *ONE_LOSS_ENDS_IT) for node in ("0", "1")]
    first, second = two_agents(tmp_path, *nodes, driver=INTERRUPTED.format(name="SIGTERM"), **HANG)
    assert (second[0], second[2].splitlines()[-1]) == (143, "ntp-launch: stopped by SIGTERM")
    assert first[0] == 1
    assert "ntp-launch: node 1 is lost: its agent was stopped by SIGTERM; logs in" in first[2]
    wait(lambda: not processes_of(tmp_path), seconds=10)


def test_a_second_signal_cuts_no_end_short(tmp_path: Path) -> None:
    process = start(tmp_path, *ONE_REPLICA, driver=AGAIN, **{f"STUB_{rank}": "deaf" for rank in range(3)})
    wait(lambda: len(seen(tmp_path)) == 3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "rank 0 warns\nntp-launch: stopped by SIGINT\n")
    assert time.monotonic() - begun < STOP_S  # deaf workers need not be waited for any more
    assert_nothing_is_left(tmp_path)


def test_a_signal_ends_a_launcher_whose_output_nobody_reads(tmp_path: Path) -> None:
    driver = "from ntp_launcher import signals; signals.LAST_S = 2.0; " + DRIVER
    loud = {f"STUB_{rank}": "loud" for rank in range(3)}
    with start(tmp_path, *ONE_REPLICA, driver=driver, **loud) as process:
        wait(lambda: len(seen(tmp_path)) == 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    wait(lambda: not processes_of(tmp_path), seconds=10)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "LAST_S", 1e6)
    before = signal.getsignal(signal.SIGHUP)
    with signals.ending_signals():
        yield
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.usefixtures("taken")
def test_the_first_signal_raises_once_at_the_end_of_the_outermost_context() -> None:
    done: list[str] = []

    def interrupted() -> None:
        with signals.held():
            with signals.held():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("never")

    with pytest.raises(SignalException) as raised:
        interrupted()
    assert done == ["inner", "outer"]
    assert raised.value.sigval is signal.SIGTERM
    assert not signals.is_hurried()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.is_hurried()


def test_a_fence_reaches_a_worker_that_is_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleeper(rank: int, module: str, environ: Mapping[str, str], log_dir: Path) -> WorkerProcess:
        popen = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        (tmp_path / "stderr").touch()
        nodes_crew.fence()
        return WorkerProcess(rank, popen, tmp_path / "stdout", tmp_path / "stderr")

    monkeypatch.setattr(crew, "start_worker", sleeper)
    recipe = Recipe("none", lambda rank, incarnation: {}, tmp_path, lambda rank: 0, False, (), 1.0)
    nodes_crew = Crew(recipe)
    for rank in (0, 1):
        nodes_crew.obey(Start(rank, 0))
    assert set(nodes_crew.pids) == {0}  # nothing is started after it
    news: list[WorkerExited | ProbeDone] = []
    wait(lambda: bool(news.extend(nodes_crew.news()) or news), seconds=10)
    [end] = news
    assert isinstance(end, WorkerExited)
    assert (end.rank, end.code) == (0, -signal.SIGKILL)


def test_the_failure_of_a_restarted_job_names_its_own_logs(tmp_path: Path) -> None:
    options = [*ONE_REPLICA, *ONE_LOSS_ENDS_IT, "--max-restarts", "1"]
    code, _, err = launch(
        tmp_path, *options, STUB_1="raise:again", STUB_COUNT="3", STUB_0="lose", STUB_2="lose"
    )
    assert code == 1
    logs = tmp_path / "logs" / "attempt1"
    assert f"  the rest is in {logs / 'rank1' / 'stderr.log'}\n" in err
    assert err.endswith(f"; logs in {logs}\n")
