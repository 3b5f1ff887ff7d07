"""The main job through the launcher: real processes, real text, and an independent trainer beside it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ntp.config import load_config
from ntp.data import datasets_of
from tests.transformers_training import train_losses

ROOT = Path(__file__).parent.parent
BITS = ("loss_bits", "grad_norm_bits")


def launch(run_dir, config, *options, code=0):
    """Run `ntp-launch` to its end; its metrics and summary."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    command = [
        sys.executable,
        "-m",
        "ntp_launcher",
        str(ROOT / "configs" / config),
        "--run-dir",
        str(run_dir),
    ]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize("name", ["tiny-cpu.yaml", "tiny-qwen-cpu.yaml"])
def test_twenty_steps_follow_transformers_and_torch_adamw(tmp_path, name):
    config = load_config(ROOT / "configs" / name)
    lines, summary = launch(tmp_path, name)
    losses = [line["loss"] for line in lines]
    expected = list(train_losses(config, datasets_of(config)))
    assert len(losses) == len(expected) == 20
    assert abs(losses[0] / math.log(config.model.vocab_size) - 1) < 0.02
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-3
    assert summary["degrees"] == {"0": 4, "1": 4}
    assert summary["world_size"] == 8


SHORT = ("--set", "train.steps=4", "--set", "model.num_hidden_layers=2", "--set", "train.seq_len=64")
MESHES = {
    "one rank lost": ("--failed", "3"),
    "two ranks lost, taken over by standbys": ("--failed", "3,dp=1/tp=1", "--set", "parallel.standbys=2"),
    "a replica lost but for one rank": ("--failed", "1,2,3"),
    "one replica of three": ("--set", "parallel.dp=1", "--set", "parallel.tp=3"),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("healthy"), "tiny-cpu.yaml", *SHORT)


@pytest.mark.parametrize("mesh", MESHES)
def test_real_processes_compute_the_same_bits_whatever_failed(tmp_path, healthy, mesh):
    lines, summary = launch(tmp_path, "tiny-cpu.yaml", *SHORT, *MESHES[mesh])
    assert [[line[key] for key in BITS] for line in lines] == [
        [line[key] for key in BITS] for line in healthy[0]
    ]
    assert summary["weights_sha256"] == healthy[1]["weights_sha256"]
    assert summary["state_sha256"] == healthy[1]["state_sha256"]
    assert summary["world_size"] == len(json.loads((tmp_path / "plan.json").read_text())["workers"])
