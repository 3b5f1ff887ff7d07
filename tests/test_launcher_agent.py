"""The launcher on real processes: who is started with what, how a job ends, and that nothing is left.

The workers are stand-ins (`stub_worker`), so that each test says how every rank ends.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from ntp_launcher import agent, board, cli
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny-cpu.yaml")
DRIVER = "import sys; from ntp_launcher.cli import main; sys.exit(main(worker_module='tests.stub_worker'))"
ONE_REPLICA = ["--set", "parallel.dp=1", "--set", "parallel.tp=3"]
ONE_LOSS_ENDS_IT = ["--set", "elastic.enabled=false"]
LOST = {f"STUB_{rank}": "lose" for rank in range(4)}


def start(
    run_dir: Path,
    *options: str,
    output: int | IO[str] = subprocess.PIPE,
    driver: str = DRIVER,
    **environ: str,
) -> "subprocess.Popen[str]":
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "STUB_"))}
    return subprocess.Popen(
        [sys.executable, "-c", driver, TINY, "--run-dir", str(run_dir), *options],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": path, **environ},
        stdout=output,
        stderr=output,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def launch(run_dir: Path, *options: str, **environ: str) -> tuple[int, str, str]:
    return finish(start(run_dir, *options, **environ))


def seen(run_dir: Path) -> dict[int, Mapping[str, Any]]:
    """What each started worker wrote down, by rank."""
    files = run_dir.glob("seen*.json")
    return {int(file.stem.removeprefix("seen")): json.loads(file.read_text()) for file in files}


def wait(condition: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_nothing_is_left(run_dir: Path) -> None:
    pids = [pid for worker in seen(run_dir).values() for pid in worker["pids"]]
    assert pids
    wait(lambda: not any(is_running(pid) for pid in pids), seconds=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_exactly_the_live_ranks_and_standbys_are_started(tmp_path: Path) -> None:
    options = [*ONE_REPLICA, "--set", "parallel.standbys=2", "--failed", "0,4"]
    code, out, err = launch(tmp_path, *options)
    assert (code, err) == (0, "rank 1 warns\n")
    assert out.splitlines()[0] == "hello from 1"  # the lowest live rank is shown, no other
    assert out.count("hello") == 1
    workers = seen(tmp_path)
    assert sorted(workers) == [1, 2, 3]
    for rank, worker in workers.items():
        environ = worker["environ"]
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "5")
        assert (environ["NTP_FAILED"], environ["NTP_RUN_DIR"]) == ("0,4", str(tmp_path))
        assert (environ["OMP_NUM_THREADS"], environ["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "True")
        assert environ["MASTER_ADDR"] == "localhost"
        assert json.loads(environ["NTP_CONFIG"])["parallel"]["standbys"] == 2
        logs = tmp_path / "logs" / f"rank{rank}"
        assert (logs / "stdout.log").read_text() == f"hello from {rank}\n"
        assert (logs / "stderr.log").read_text() == f"rank {rank} warns\n"
    assert "standbys: 2" in (tmp_path / "resolved.yaml").read_text()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["failed"] == [0, 4]
    assert plan["replicas"][0]["members"] == [3, 1, 2]
    assert_nothing_is_left(tmp_path)


def test_tee_and_log_dir_are_torchruns(tmp_path: Path) -> None:
    options = [*ONE_REPLICA, "--tee", "1:3,2:1", "--log-dir", str(tmp_path / "elsewhere")]
    code, out, err = launch(tmp_path / "run", *options, OMP_NUM_THREADS="2")
    assert code == 0
    assert sorted(out.splitlines())[:2] == ["[rank1] hello from 1", "[rank2] hello from 2"]
    assert err == "[rank1] rank 1 warns\n"
    assert (tmp_path / "elsewhere" / "rank0" / "stdout.log").read_text() == "hello from 0\n"
    assert seen(tmp_path / "run")[0]["environ"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("kill:9", "rank 1 was killed by SIGKILL"),
        ("kill:11", "rank 1 was killed by SIGSEGV"),
        ("raise:the real cause", "rank 1 exited with code 1: ValueError: the real cause"),
        ("exit:0", "rank 1 exited with code 0 before the end of the run"),
    ],
)
def test_a_failure_is_told_by_its_cause_and_leaves_nothing(end: str, said: str, tmp_path: Path) -> None:
    roles = {**LOST, "STUB_1": end, "STUB_2": "deaf"}
    code, _, err = launch(tmp_path, *ONE_REPLICA, *ONE_LOSS_ENDS_IT, STUB_COUNT="3", **roles)
    assert code == 1
    assert err.splitlines()[-1] == f"ntp-launch: {said}; logs in {tmp_path / 'logs'}"
    assert_nothing_is_left(tmp_path)


def test_workers_that_all_leave_early_are_no_success(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")  # of an earlier run
    code, _, err = launch(tmp_path, *ONE_REPLICA, STUB_COUNT="3", **{f"STUB_{r}": "exit:0" for r in range(3)})
    assert code == 1
    assert "exited with code 0 before the end of the run; logs in" in err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, *ONE_REPLICA, **{f"STUB_{rank}": "hang" for rank in range(3)})
    wait(lambda: len(seen(tmp_path)) == 3)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err == f"rank 0 warns\nntp-launch: stopped by {number.name}\n"
    assert_nothing_is_left(tmp_path)


def test_a_run_goes_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    with start(tmp_path, *ONE_REPLICA) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0
    assert said.count("stdout cannot be written any more (Broken pipe); the run goes on") == 1
    assert said.count("\n") == 2  # the rank's own warning


def test_a_run_without_any_output_ends_as_others_do(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        assert start(tmp_path, *ONE_REPLICA, output=full).wait(timeout=120) == 0
        options = [*ONE_REPLICA, *ONE_LOSS_ENDS_IT]
        failing = start(tmp_path, *options, output=full, STUB_1="exit:5", STUB_COUNT="3")
        assert failing.wait(timeout=120) == 1


def test_a_worker_takes_sigint_for_its_end_and_not_for_an_error() -> None:
    code = "import os, signal; from ntp import worker; worker.Surroundings = Interrupt; worker.main()"
    interrupt = "class Interrupt: from_environment = lambda: os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run(
        [sys.executable, "-c", f"{interrupt}\n{code}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, *ONE_REPLICA, **{f"STUB_{rank}": "deaf" for rank in range(3)})
    wait(lambda: len(seen(tmp_path)) == 3)
    process.kill()
    finish_quietly(process)
    children = [worker["pids"][1] for worker in seen(tmp_path).values()]
    wait(lambda: not any(is_running(worker["pids"][0]) for worker in seen(tmp_path).values()), seconds=10)
    for child in children:  # the kernel ends workers; what they have started is theirs to end
        os.kill(child, signal.SIGKILL)


def finish_quietly(process: "subprocess.Popen[str]") -> None:
    """Reaps a killed launcher without reading pipes that orphans may hold open."""
    process.wait(timeout=30)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()


def test_all_workers_are_restarted_as_often_as_asked(tmp_path: Path) -> None:
    options = [*ONE_REPLICA, *ONE_LOSS_ENDS_IT, "--max-restarts", "1"]
    code, out, _ = launch(tmp_path, *options, STUB_1="once")
    assert code == 0
    assert out.count("hello from 0") == 2
    assert (tmp_path / "logs" / "attempt1" / "rank1" / "stdout.log").exists()
    assert {w["environ"]["TORCHELASTIC_RESTART_COUNT"] for w in seen(tmp_path).values()} == {"1"}


def test_a_run_directory_is_one_jobs_until_its_launcher_is_gone(tmp_path: Path) -> None:
    process = start(tmp_path, *ONE_REPLICA, **{f"STUB_{rank}": "deaf" for rank in range(3)})
    wait(lambda: len(seen(tmp_path)) == 3)
    before = {name: (tmp_path / name).read_text() for name in ("resolved.yaml", "events.jsonl")}
    code, out, err = launch(tmp_path, *ONE_REPLICA, "--set", "train.seed=1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{str(tmp_path)!r} is in use by a running job (process {process.pid} on " in err
    assert before == {name: (tmp_path / name).read_text() for name in before}
    process.kill()
    finish_quietly(process)
    children = [worker["pids"][1] for worker in seen(tmp_path).values()]
    assert launch(tmp_path, *ONE_REPLICA)[0] == 0  # whatever workers have left behind
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_a_run_directory_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    code, out, err = launch(tmp_path, *ONE_REPLICA)
    assert (code, out) == (2, "")
    assert err == f"ntp-launch: cannot write the run directory {str(tmp_path)!r}: Is a directory\n"


def events(run_dir: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_a_new_run_begins_with_files_of_its_own_and_says_so(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints" / "step1"
    kept.mkdir(parents=True)
    _, _, first = launch(tmp_path, *ONE_REPLICA)
    assert "replaced" not in first
    for told in ("metrics.jsonl", "tensorboard/events.out.tfevents.1"):
        (tmp_path / told).parent.mkdir(exist_ok=True)
        (tmp_path / told).write_text("of an earlier run\n")
    code, _, err = launch(tmp_path, *ONE_REPLICA, "--failed", "2", "--set", "train.seed=1")
    assert code == 0
    assert err.count(f"ntp-launch: the results of an earlier run in {str(tmp_path)!r} are replaced\n") == 1
    assert events(tmp_path) == ["start", "end"]
    assert "earlier" not in (tmp_path / "metrics.jsonl").read_text()
    assert list((tmp_path / "tensorboard").iterdir()) == []
    assert kept.exists()


def test_a_restart_of_all_workers_is_no_new_run(tmp_path: Path) -> None:
    options = [*ONE_REPLICA, *ONE_LOSS_ENDS_IT, "--max-restarts", "1"]
    code, _, err = launch(tmp_path, *options, STUB_1="once")
    assert (code, "replaced" in err) == (0, False)
    assert events(tmp_path).count("start") == 2


def two_agents(
    tmp_path: Path, *options: tuple[str, ...], driver: str = DRIVER, **environ: str
) -> list[tuple[int, str, str]]:
    """Two agents on this host, for a mesh of 1 x TP4; `options` are each one's own."""
    shared = ["--set", "parallel.dp=1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}"]
    processes = [start(tmp_path, *shared, *own, driver=driver, **environ) for own in options]
    return [finish(process) for process in processes]


def test_two_agents_on_one_host_run_one_job(tmp_path: Path) -> None:
    ends = two_agents(tmp_path, ("--node-rank", "1"), ("--node_rank=0", "--rdzv_backend=c10d"))
    assert [code for code, _, _ in ends] == [0, 0]
    assert ["hello" in out for _, out, _ in ends] == [False, True]
    environs = {rank: worker["environ"] for rank, worker in seen(tmp_path).items()}
    assert {rank: environ["LOCAL_RANK"] for rank, environ in environs.items()} == {
        0: "0",
        1: "1",
        2: "0",
        3: "1",
    }
    assert len({environ["MASTER_PORT"] for environ in environs.values()}) == 1
    assert {environ["WORLD_SIZE"] for environ in environs.values()} == {"4"}


def test_a_failure_on_one_node_ends_the_other_with_the_same_words(tmp_path: Path) -> None:
    roles = {"STUB_0": "lose", "STUB_1": "deaf", "STUB_2": "lose", "STUB_3": "kill:9", "STUB_COUNT": "4"}
    options = [("--node-rank", node, *ONE_LOSS_ENDS_IT) for node in ("0", "1")]
    ends = two_agents(tmp_path, *options, **roles)
    for code, _, err in ends:
        assert code == 1
        assert "ntp-launch: rank 3 was killed by SIGKILL;" in err
    assert_nothing_is_left(tmp_path)


def test_agents_with_different_jobs_start_nothing(tmp_path: Path) -> None:
    ends = two_agents(tmp_path, ("--failed", "3"), ("--set", "train.seed=1"))
    for code, _, err in ends:
        assert code == 2
        assert "another config or other failed ranks" in err
    assert seen(tmp_path) == {}


def test_an_agent_that_goes_away_after_the_meeting_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_PATIENCE_S", 0.1)
    with pytest.raises(RendezvousError, match="1 of 2 agents went away"):
        board.Board(HashStore(), 0, 2).exchange("claim", {})


def test_a_rendezvous_that_does_not_answer_is_told_without_torchs_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RendezvousConnectionError("The connection has failed. See inner exception for details.")

    monkeypatch.setattr(agent, "_run", fails)
    job: Any = SimpleNamespace(config=SimpleNamespace(log=SimpleNamespace(level="debug")))
    nodes: Any = SimpleNamespace(rdzv_endpoint="first:29400")
    said = "no rendezvous at first:29400: the store there does not answer"
    assert agent.launch(job, nodes) == (5, said)


def test_torch_is_quiet_in_the_launcher_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_CPP_LOG_LEVEL"
    monkeypatch.delenv(name, raising=False)
    with cli._quiet_torch("info"):
        assert os.environ[name] == "ERROR"
    assert name not in os.environ
    monkeypatch.setenv(name, "INFO")
    with cli._quiet_torch("info"):
        assert os.environ[name] == "INFO"
    assert os.environ[name] == "INFO"
