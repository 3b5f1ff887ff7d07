"""Losses under a running launcher: real processes (`elastic_stub`), killed, stopped and taken back."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ntp_launcher import heal_cli
from ntp_launcher.cli import main
from ntp_launcher.heal import request, take_requests

from tests.test_launcher_agent import is_running, wait

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny-cpu.yaml")
STUB = "tests.elastic_stub"
DRIVER = f"import sys; from ntp_launcher.cli import main; sys.exit(main(worker_module='{STUB}'))"
STEPS = 40
SETTINGS = {
    "parallel.dp": "2",
    "parallel.tp": "2",
    "train.steps": str(STEPS),
    "train.timeout_s": "2",
    "elastic.step_timeout_s": "4",
    "elastic.rejoin_after_s": "0.1",
    "elastic.lease_s": "3.0",
}


def options(run_dir: Path, *overrides: str) -> list[str]:
    """Arguments for a mesh of 2 x TP2 with short time-outs."""
    sets = [f"{key}={value}" for key, value in SETTINGS.items()]
    pairs = [word for text in (*sets, *overrides) for word in ("--set", text)]
    return [TINY, "--run-dir", str(run_dir), *pairs]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("STUB_STEPS", str(STEPS))
    monkeypatch.chdir(ROOT)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    previous = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a job in this process with STUB_ faults by rank; its exit code and stderr."""

    def launch(faults: dict[int, str], *overrides: str) -> tuple[int, str]:
        for rank, what in faults.items():
            monkeypatch.setenv(f"STUB_{rank}", what)
        code = main(options(tmp_path, *overrides), worker_module=STUB)
        wait(lambda: not any(is_running(pid) for pid in pids(tmp_path).values()), seconds=10)
        return code, capfd.readouterr().err

    return launch


def pids(run_dir: Path) -> dict[str, int]:
    """Process ids by `<rank>.<incarnation>`."""
    files = run_dir.glob("pid*")
    return {file.name.removeprefix("pid"): int(text) for file in files if (text := file.read_text())}


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def steps(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def causes(run_dir: Path) -> list[str]:
    return [recovery["cause"] for recovery in summary(run_dir)["recoveries"]]


def test_a_killed_worker_is_lost_at_once_and_comes_back(tmp_path: Path, run: Run) -> None:
    assert run({1: "kill@s5"}) == (
        0,
        "ntp-launch: rank 1 was killed by SIGKILL; generation 1 has 3 of 4 ranks\n"
        "ntp-launch: rank 1 joined; generation 2 has 4 of 4 ranks\n",
    )
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    assert sorted(pids(tmp_path)) == ["0.0", "1.0", "1.1", "2.0", "3.0"]  # nobody else was started again
    loss, join = summary(tmp_path)["recoveries"]
    assert (
        loss["detect"] + loss["agree"] < 1.0
    )  # 0.06 to 0.10 s on an idle machine; a test runs beside others
    assert (loss["kind"], loss["bytes_moved"], loss["source"]) == ("loss", 5, "peers")
    assert loss["unblock"] + loss["rebuild"] + loss["move"] + loss["replay"] == pytest.approx(0.1)
    assert join["kind"] == "join"
    assert summary(tmp_path)["generations"] == 3
    assert summary(tmp_path)["members"] == [0, 1, 2, 3]
    assert 0 < summary(tmp_path)["goodput"] < 1


def test_every_kind_of_end_is_survived_the_reporters_own_included(tmp_path: Path, run: Run) -> None:
    faults = {0: "segv@s4", 1: "exit@s8", 2: "kill@s12", 3: "kill@s4"}
    assert run(faults, "elastic.rejoin=never")[0] == 3  # nobody is left
    assert steps(tmp_path) == list(range(1, 12))
    assert not (tmp_path / "summary.json").exists()
    faults |= {2: "raise@s12", 3: ""}
    assert run(faults, "elastic.rejoin=never")[0] == 0
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    assert summary(tmp_path)["members"] == [3]
    assert causes(tmp_path) == [
        "rank 0 was killed by SIGSEGV",
        "rank 1 exited with code 0 before the end of the run",
        "rank 2 exited with code 1: ValueError: an error of its own",
    ]


def test_a_hung_worker_is_killed_and_its_peers_are_not(tmp_path: Path, run: Run) -> None:
    code, _ = run({2: "stop@s6", 1: "sleep@s20"})
    assert code == 0
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    hung = [recovery for recovery in summary(tmp_path)["recoveries"] if "hung" in recovery["cause"]]
    assert [r["cause"].partition(" (")[0] for r in hung] == [
        "rank 2 hung in step 6, phase step",
        "rank 1 hung in step 20, phase step",
    ]
    assert all(4.0 < recovery["detect"] < 6.5 for recovery in hung)
    assert sorted(pids(tmp_path)) == ["0.0", "1.0", "1.1", "2.0", "2.1", "3.0"]


def test_a_loss_during_a_recovery_opens_another_generation(tmp_path: Path, run: Run) -> None:
    code, _ = run({1: "kill@s5", 2: "kill@g1", 3: "stop@g2"}, "elastic.rejoin=never")
    assert code == 0
    assert summary(tmp_path)["members"] == [0]
    assert summary(tmp_path)["generations"] == 4
    assert steps(tmp_path) == list(range(1, STEPS + 1))


def test_losses_without_progress_end_the_job_with_a_code_of_their_own(run: Run) -> None:
    faults = {1: "kill@s5", 2: "kill@g1", 3: "kill@g2"}
    code, err = run(faults, "elastic.max_recoveries_without_progress=2")
    assert code == 4
    assert "ntp-launch: 2 recoveries without a committed step" in err.splitlines()[-1]


def test_an_error_that_all_share_is_the_programs_own(run: Run) -> None:
    code, err = run(dict.fromkeys(range(4), "raise@s3"))
    assert code == 1
    assert "exited with code 1: ValueError: an error of its own" in err.splitlines()[-1]


def test_a_standby_takes_over(tmp_path: Path, run: Run) -> None:
    code, _ = run({0: "kill@s5"}, "parallel.standbys=1", "elastic.rejoin=never")
    assert code == 0
    assert summary(tmp_path)["members"] == [1, 2, 3, 4]


def test_a_device_that_fails_the_probe_stays_out_until_it_is_healed(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = tmp_path / "well"
    monkeypatch.setenv("STUB_PACE", "0.1")

    def repair() -> None:
        wait((tmp_path / "logs" / "rank3" / "probe.log").exists)
        time.sleep(0.3)
        well.touch()
        assert heal_cli.main([str(tmp_path), "--ranks", "dp=1/tp=1"]) == 0

    repairer = threading.Thread(target=repair)
    repairer.start()
    code, err = run({3: "kill@s5"}, f"elastic.probe=[test, -e, {well}]")
    repairer.join()
    assert code == 0
    assert "rank 3 stays out (its device failed the probe: exit code 1)" in err
    assert summary(tmp_path)["members"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("failed", "asked", "told"),
    [
        ([3], "3", "rank 3 is not taking part: its device is looked at, and what is well comes back at"),
        ([1, 3], "1,3", "ranks 1, 3 are not taking part: their devices are looked at"),
        ([], "0,2", "ranks 0, 2 are taking part already: nothing to do"),
        ([3], "3,0", "comes back at a step boundary; rank 0 is taking part already: nothing to do"),
    ],
)
def test_healing_says_what_happens_to_each_rank(
    failed: list[int],
    asked: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(run_dir: Path, ranks: Sequence[int]) -> Path:
        request(run_dir, ranks)
        assert take_requests(run_dir) == ranks
        return run_dir / "taken"

    monkeypatch.setattr(heal_cli, "request", take)
    (tmp_path / "resolved.yaml").write_text(Path(TINY).read_text())
    start = {"time": 1.0, "kind": "start", "text": "", "generation": 0, "failed": [2]}
    events = [start, {**start, "kind": "join", "failed": failed}, {"time": 2.0, "kind": "save", "text": ""}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert heal_cli.main([str(tmp_path), "--ranks", asked]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ntp-heal: rank")
    assert told in line


def test_the_help_of_healing_tells_of_every_way_to_name_ranks() -> None:
    said = heal_cli.build_parser().format_help()
    assert all(way in said for way in ("3,5", "dp=0/tp=3", "@FILE"))


def test_healing_a_job_that_does_not_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heal_cli.main([str(tmp_path), "--ranks", "3"]) == 2
    monkeypatch.setattr(heal_cli, "_PATIENCE_S", 0.1)
    (tmp_path / "resolved.yaml").write_text(Path(TINY).read_text())
    assert heal_cli.main([str(tmp_path), "--ranks", "99"]) == 2
    assert heal_cli.main([str(tmp_path), "--ranks", "3"]) == 2
    assert "no launcher is running" in capsys.readouterr().err
