"""The disk of a run directory fills while the run goes on: no step is lost for it, and all is said."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.test_checkpoint_damage import mounted
from tests.test_launcher_agent import wait

ROOT = Path(__file__).parent.parent
STEPS = 60
SETTINGS = (f"train.steps={STEPS}", "train.global_batch=4", "train.seq_len=16", "checkpoint.every=0")
MESH = ("parallel.dp=1", "parallel.tp=1")
ENDS_SOON = ("checkpoint.every=2", "train.stop_after=12")


def start(run_dir, log_dir, *settings):
    values = [part for setting in (*SETTINGS, *MESH, *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "ntp_launcher", str(ROOT / "configs" / "tiny-cpu.yaml"), *values]
    where = ["--run-dir", str(run_dir), "--log-dir", str(log_dir)]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    environ = {**os.environ, "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *where], env=environ, **pipes)


def fill(path):
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass


def written(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("is_freed", [True, False], ids=["for a while", "to the end"])
def test_a_disk_that_fills_during_a_run_costs_no_step_and_is_told(tmp_path, is_freed):
    with mounted(tmp_path / "disk", "-o", "size=64M"):
        run_dir, filler = tmp_path / "disk" / "run", tmp_path / "disk" / "filler"
        process = start(run_dir, tmp_path / "logs")
        wait(lambda: len(written(run_dir)) >= 3)
        fill(filler)
        if is_freed:
            told = run_dir / "events.jsonl"
            wait(lambda: "metrics.jsonl cannot be written" in told.read_text() or process.poll() is not None)
            time.sleep(0.2)
            filler.unlink()
        said, _ = process.communicate(timeout=120)
        assert "Traceback" not in said
        assert "metrics.jsonl cannot be written (No space left on device)" in said
        steps = written(run_dir)
        assert not list(run_dir.glob("*.tmp"))
        if is_freed:
            assert process.returncode == 0, said
            assert steps == [*range(1, STEPS + 1)]
            assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
        else:
            assert process.returncode == 1, said
            assert steps == [*range(1, len(steps) + 1)]
            last = said.splitlines()[-1]
            assert "the run is complete, but summary.json cannot be written: No space left on device" in last


def test_a_last_save_that_finds_no_room_is_told_although_no_log_has_any(tmp_path):
    with mounted(tmp_path / "disk", "-o", "size=1M"):
        fill(tmp_path / "disk" / "filler")
        where = f"checkpoint.dir={tmp_path / 'disk' / 'checkpoints'}"
        process = start(tmp_path / "run", tmp_path / "disk" / "logs", where, *ENDS_SOON)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    assert "checkpoint of step 2 failed, training goes on: rank 0: No space left on device" in said
    last = said.splitlines()[-1]
    assert "the last checkpoint, of step 12, failed: rank 0: No space left on device" in last
