"""The main job through the launcher: real processes, real text, and an independent trainer beside it."""

import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ntp.config import load_config
from ntp.data import datasets_of
from ntp.run_directory import metrics_line
from tests.training import train
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


def one_rank(name, *options):
    """The metrics and hashes of the same run on one simulated rank of this process."""
    alone = ("parallel.dp=1", "parallel.tp=1")
    config = load_config(ROOT / "configs" / name, [*options[1::2], *alone])
    run = train(config, datasets_of(config))
    return [metrics_line(step, None, 0) for step in run.steps], asdict(run.hashes)


@pytest.mark.parametrize(("name", "length"), [("tiny-cpu.yaml", 256), ("tiny-qwen-cpu.yaml", 64)])
def test_twenty_steps_follow_transformers_and_torch_adamw(name, length):
    """On one rank, whose bits are those of every mesh and of real processes: see below."""
    torch.set_num_threads(1)
    seq_len = f"train.seq_len={length}"
    config = load_config(ROOT / "configs" / name, [seq_len])
    losses = [line["loss"] for line in one_rank(name, "--set", seq_len)[0]]
    expected = list(train_losses(config, datasets_of(config)))
    assert len(losses) == len(expected) == 20
    assert abs(losses[0] / math.log(config.model.vocab_size) - 1) < 0.02
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-3


SHORT = ("--set", "train.steps=4", "--set", "model.num_hidden_layers=2", "--set", "train.seq_len=64")
TINY, QWEN = "tiny-cpu.yaml", "tiny-qwen-cpu.yaml"
WORKERS = {  # by what failed: the configuration, options, and how many ranks each replica then has
    "nothing": (TINY, (), [4, 4]),
    "nothing, of a Qwen3": (QWEN, (), [4, 4]),
    "one rank lost": (TINY, ("--failed", "3"), [3, 4]),
    "two ranks lost, taken over by standbys": (
        TINY,
        ("--failed", "3,dp=1/tp=1", "--set", "parallel.standbys=2"),
        [4, 4],
    ),
    "a replica lost but for one rank": (TINY, ("--failed", "1,2,3"), [1, 4]),
    "one replica of three": (TINY, ("--set", "parallel.dp=1", "--set", "parallel.tp=3"), [3]),
}


@pytest.fixture(scope="module")
def expected():
    """What one simulated rank computes, by configuration."""
    torch.set_num_threads(1)
    return functools.cache(lambda name: one_rank(name, *SHORT))


@pytest.mark.parametrize("failed", WORKERS)
def test_real_processes_compute_the_same_bits_whatever_failed(tmp_path, expected, failed):
    name, options, degrees = WORKERS[failed]
    lines, summary = launch(tmp_path, name, *SHORT, *options)
    steps, hashes = expected(name)
    assert [[line[key] for key in BITS] for line in lines] == [[line[key] for key in BITS] for line in steps]
    assert {key: summary[key] for key in hashes} == hashes
    assert summary["degrees"] == {str(replica): degree for replica, degree in enumerate(degrees)}
    assert summary["world_size"] == sum(degrees)
    assert summary["world_size"] == len(json.loads((tmp_path / "plan.json").read_text())["workers"])
