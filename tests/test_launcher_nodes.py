"""Two agents on one host: one is killed, cut off or surplus, and the job goes on, or ends everywhere."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import Agents
from tests.test_launcher_agent import is_running, wait
from tests.test_launcher_elastic import SETTINGS, STUB, TINY, pids, steps, summary

STUBS = [TINY, *(word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}"))]


def stubs(directory: Path, *options: str) -> Agents:
    return Agents(directory, [*STUBS, *options], STUB, STUB_STEPS="100000", STUB_PACE="0.05")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    started = stubs(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
def test_a_killed_node_is_survived_and_its_next_agent_taken_in(agents: Agents) -> None:
    first, second = agents.start(0), agents.start(1)
    wait(lambda: len(steps(agents.run_dir)) > 2)
    second.kill()
    wait(lambda: "node 1 is lost" in agents.said(0))
    third = agents.start(1)
    wait(lambda: "4 of 4 ranks" in agents.said(0))
    third.send_signal(signal.SIGSTOP)
    wait(lambda: agents.said(0).count("node 1 is lost") == 2)
    third.send_signal(signal.SIGCONT)  # it finds its lease lost, kills its workers and asks to be taken in
    wait(lambda: not is_running(pids(agents.run_dir)["2.1"]))
    wait(lambda: agents.said(0).count("4 of 4 ranks") == 2)
    known = len(steps(agents.run_dir))
    wait(lambda: len(steps(agents.run_dir)) > known + 3)
    (agents.run_dir / "enough").touch()
    assert first.wait(150) == 0
    assert third.wait(150) == 0
    assert steps(agents.run_dir) == list(range(1, len(steps(agents.run_dir)) + 1))
    assert summary(agents.run_dir)["members"] == [0, 1, 2, 3]


def test_the_loss_of_the_stores_host_ends_the_job_everywhere(agents: Agents) -> None:
    first, second = agents.start(0), agents.start(1)
    wait(lambda: len(steps(agents.run_dir)) > 2)
    first.kill()
    assert second.wait(150) == 5
    assert "lost the control store" in agents.said(1).splitlines()[-1]
    wait(lambda: not any(is_running(pid) for pid in pids(agents.run_dir).values()), seconds=10)


def test_a_store_outside_outlives_the_leader_and_the_job_ends_all_the_same(tmp_path: Path) -> None:
    store = subprocess.Popen(
        [sys.executable, "-m", "ntp_launcher.store_cli", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert store.stdout is not None
    port = int(store.stdout.readline().split()[-1])
    agents = stubs(tmp_path, "--control-endpoint", f"localhost:{port}")
    first, second = agents.start(0), agents.start(1)
    wait(lambda: len(steps(agents.run_dir)) > 2)
    first.kill()
    assert second.wait(150) == 5
    assert "the agent of node 0, which leads, is gone" in agents.said(1).splitlines()[-1]
    wait(lambda: not any(is_running(pid) for pid in pids(agents.run_dir).values()), seconds=10)
    store.terminate()
    assert store.wait(30) == 0
    store.stdout.close()
    agents.close()
