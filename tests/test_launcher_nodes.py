"""Two agents on one host: one is killed, cut off or surplus, and the job goes on, or ends everywhere."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from ntp_launcher.agent import MeshAgent
from ntp_launcher.late import LateRendezvous, Place

from ntp.config import dump_yaml
from ntp.testing.trial import Trial, evidence_of, losses_of, processes_of, reference
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


def lose_node_0(agents: Agents, reason: str) -> None:
    """Kill the agent that leads: the other says why the job ends, and no worker is left."""
    first, second = agents.start(0), agents.start(1)
    wait(lambda: len(steps(agents.run_dir)) > 2)
    first.kill()
    assert second.wait(150) == 5
    assert reason in agents.said(1).splitlines()[-1]
    wait(lambda: not any(is_running(pid) for pid in pids(agents.run_dir).values()), seconds=10)


def test_the_loss_of_the_stores_host_ends_the_job_everywhere(agents: Agents) -> None:
    lose_node_0(agents, "lost the control store")


def test_a_store_outside_outlives_the_leader_and_the_job_ends_all_the_same(tmp_path: Path) -> None:
    store = subprocess.Popen(
        [sys.executable, "-m", "ntp_launcher.store_cli", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert store.stdout is not None
    port = int(store.stdout.readline().split()[-1])
    agents = stubs(tmp_path, "--control-endpoint", f"localhost:{port}")
    lose_node_0(agents, "the agent of node 0, which leads, is gone")
    store.terminate()
    assert store.wait(30) == 0
    store.stdout.close()
    agents.close()


THIRTY = {"train": {"steps": 30}}
LONG = {
    "train": {"steps": 10_000, "timeout_s": 10.0},
    "elastic": {"step_timeout_s": 20.0, "checkpoint_timeout_s": 20.0, "lease_s": 3.0},
}


def trainers(directory: Path, settings: Mapping[str, Mapping[str, object]]) -> Agents:
    """Agents of real workers; node 0 has one replica, node 1 the other."""
    config = directory / "config.yaml"
    config.write_text(dump_yaml(Trial(2, 2, settings=settings).config()))
    return Agents(directory, [str(config)])


def wait_until_whole(agents: Agents) -> None:
    """Until every rank that was lost has been taken back, and steps have been committed since."""
    wait(lambda: "4 of 4 ranks" in agents.said(0).rpartition(" is lost")[2])
    known = len(losses_of(agents.run_dir))
    wait(lambda: len(losses_of(agents.run_dir)) > known + 1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_node_leaves_and_comes_back_twenty_times(tmp_path: Path) -> None:
    with closing(trainers(tmp_path, LONG)) as agents:
        first, second = agents.start(0), agents.start(1)
        wait(lambda: len(losses_of(agents.run_dir)) > 2)
        survivors = {rank: processes_of(agents.run_dir)[rank] for rank in (0, 1)}
        for times in range(20):
            second.kill()
            wait(lambda: agents.said(0).count("node 1 is lost") > times)  # noqa: B023 - called at once
            second = agents.start(1)
            wait_until_whole(agents)
        assert {rank: processes_of(agents.run_dir)[rank] for rank in (0, 1)} == survivors
        first.terminate()
        assert (first.wait(60), second.wait(60)) == (143, 143)
        losses = losses_of(agents.run_dir)
        assert losses == reference(len(losses), LONG).losses
        assert not processes_of(agents.run_dir)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_frozen_node_that_wakes_writes_nothing_and_comes_back(tmp_path: Path) -> None:
    with closing(trainers(tmp_path, LONG)) as agents:
        first, second = agents.start(0), agents.start(1)
        wait(lambda: len(losses_of(agents.run_dir)) > 2)
        stale = [processes_of(agents.run_dir)[rank] for rank in (2, 3)]
        for pid in (second.pid, *stale):
            os.kill(pid, signal.SIGSTOP)
        wait(lambda: "node 1 is lost" in agents.said(0))
        for pid in (*stale, second.pid):
            os.kill(pid, signal.SIGCONT)
        wait(lambda: not any(is_running(pid) for pid in stale), seconds=20)
        wait_until_whole(agents)
        first.terminate()
        assert (first.wait(60), second.wait(60)) == (143, 143)
        losses = losses_of(agents.run_dir)
        assert losses == reference(len(losses), LONG).losses


@pytest.mark.slow
def test_after_the_loss_of_the_stores_host_another_mesh_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with closing(trainers(tmp_path, THIRTY)) as agents:
        first, second = agents.start(0), agents.start(1)
        wait(lambda: len(losses_of(agents.run_dir)) > 5)
        first.kill()
        assert second.wait(60) == 5
        wait(lambda: not processes_of(agents.run_dir), seconds=10)
        assert len(losses_of(agents.run_dir)) < 30
        command = [sys.executable, "-m", "ntp_launcher", str(tmp_path / "config.yaml"), "--resume", "auto"]
        mesh = ["--run-dir", str(agents.run_dir), "--set", "parallel.dp=1", "--set", "parallel.tp=3"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*command, *mesh], env=environ, check=True, timeout=200, stdout=subprocess.DEVNULL)
        assert evidence_of(agents.run_dir) == reference(30, THIRTY)


def test_a_late_agent_writes_where_the_others_of_this_attempt_do() -> None:
    late = object.__new__(LateRendezvous)
    late.place = Place(node=1, session=2, run_dir="/runs/a", attempt=3)
    agent = object.__new__(MeshAgent)
    agent._attempt, agent._nodes = -1, SimpleNamespace(log_dir=None)
    assert agent._assign_worker_ranks(None, 1, 2, SimpleNamespace(rdzv_handler=late)) == []
    assert agent.log_dir == Path("/runs/a/logs/attempt3")


@pytest.mark.slow
def test_a_surplus_agent_waits_for_a_place_and_ends_with_the_job(agents: Agents) -> None:
    first, second = agents.start(0), agents.start(1)
    wait(lambda: len(steps(agents.run_dir)) > 2)
    surplus = [agents.start(1), agents.start(1)]
    second.kill()
    wait(lambda: "4 of 4 ranks" in agents.said(0))
    known = len(steps(agents.run_dir))
    wait(lambda: len(steps(agents.run_dir)) > known + 3)
    assert [agent.poll() for agent in surplus] == [None, None]
    (agents.run_dir / "enough").touch()
    ends = [agent.wait(60) for agent in (first, *surplus)]
    assert ends == [0, 0, 0]
    assert summary(agents.run_dir)["members"] == [0, 1, 2, 3]
