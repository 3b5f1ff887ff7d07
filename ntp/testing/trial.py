"""One run through the real launcher with faults in it, and what it must share with an unfailed one.

Since no mesh and no fault may change a bit, one unfailed run on one simulated rank is the reference for all.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ntp.config import Config, dump_yaml, parse_config
from ntp.data import datasets_of
from ntp.faults import Fault
from ntp.injector import ANNOUNCED
from ntp.plan import make_plan
from ntp.run_directory import bits_of, read_lines
from ntp.testing import Member, simulate
from ntp.trainer import Trainer

STEPS = 6
SAVE_EVERY = 2
DEADLINE_S = 240.0
_BASE: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 272,
        "ffn_unit": 16,
        "vocab_unit": 16,
    },
    "train": {"steps": STEPS, "seq_len": 48, "global_batch": 6, "device": "cpu", "timeout_s": 6.0},
    "checkpoint": {"every": SAVE_EVERY},
    "elastic": {
        "step_timeout_s": 8.0,
        "checkpoint_timeout_s": 10.0,
        "startup_timeout_s": 45.0,
        "rejoin_after_s": 0.2,
    },
}


Settings = Mapping[str, Mapping[str, Any]]
"""Changes of a configuration: section -> key -> value."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A mesh and the faults that strike it; `settings` are changes of other sections of the configuration."""

    dp: int
    tp: int
    faults: tuple[Fault, ...] = ()
    settings: Settings = field(default_factory=dict[str, Mapping[str, Any]])

    def describe(self) -> str:
        """One line."""
        places = [(fault.kind, fault.place) for fault in self.faults]
        struck = [f"{kind} rank {at.rank} in {at.phase} of step {at.step}" for kind, at in places]
        return f"{self.dp}x{self.tp}: {'; '.join(struck)}"

    def config(self) -> Config:
        """The whole configuration."""
        changes = {"parallel": {"dp": self.dp, "tp": self.tp}, **self.settings}
        sections = {name: {**_BASE.get(name, {}), **changes.get(name, {})} for name in (*_BASE, *changes)}
        faults = [fault.model_dump(mode="json", exclude_none=True) for fault in self.faults]
        return parse_config(json.dumps({**sections, "faults": faults}))


Losses = tuple[tuple[int, str, str], ...]
"""Number, loss and gradient norm of every step, as bits."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What every run of the same model and data has in common."""

    weights_sha256: str
    state_sha256: str
    losses: Losses


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        problem: empty where it kept every promise.
        struck: how many of its faults have happened; an earlier one may keep a later one from it.
    """

    problem: str
    seconds: float
    struck: int
    summary: Mapping[str, Any]

    @property
    def changes(self) -> int:
        """Changes of membership."""
        return len(self.summary.get("recoveries", ()))


def reference(steps: int = STEPS, settings: Settings | None = None) -> Evidence:
    """The evidence of an unfailed run after some steps, on one simulated rank of this process."""
    config = Trial(1, 1, settings=settings or {}).config()
    plan, datasets = make_plan(config), datasets_of(config)

    def body(member: Member) -> Evidence:
        trainer = Trainer(config, plan, member.mesh, datasets, torch.device("cpu"))
        results = [trainer.step(step) for step in range(1, steps + 1)]
        losses = tuple((result.step, bits_of(result.loss), bits_of(result.grad_norm)) for result in results)
        hashes = trainer.hashes()
        return Evidence(hashes.weights_sha256, hashes.state_sha256, losses)

    torch.set_num_threads(1)
    return simulate(body, plan)[0]


def run_trial(trial: Trial, directory: Path, expected: Evidence) -> Outcome:
    """Run one trial in `directory` and compare it with the reference."""
    started = time.monotonic()
    problem = _launch(trial, directory)
    seconds = time.monotonic() - started
    summary = {} if problem else json.loads((directory / "run" / "summary.json").read_text())
    if not problem and evidence_of(directory / "run") != expected:
        problem = "the bits differ"
    left = processes_of(directory / "run")
    if left:
        problem = f"{problem}; processes of ranks {sorted(left)} are left".lstrip("; ")
    return Outcome(problem, seconds, _struck(directory / "run"), summary)


def _launch(trial: Trial, directory: Path) -> str:
    """Why the run was no success, "" if it was one."""
    directory.mkdir(parents=True)
    config = directory / "config.yaml"
    config.write_text(dump_yaml(trial.config()))
    command = [sys.executable, "-m", "ntp_launcher", str(config), "--run-dir", str(directory / "run")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (directory / "output").open("wb") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, env=environ, timeout=DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {DEADLINE_S:.0f} s"
    last = (directory / "output").read_text(errors="replace").strip().splitlines()[-1:]
    return f"exit code {done.returncode}: {' '.join(last)}" if done.returncode else ""


def evidence_of(run_dir: Path) -> Evidence:
    """The evidence that a complete run has left."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return Evidence(summary["weights_sha256"], summary["state_sha256"], losses_of(run_dir))


def losses_of(run_dir: Path) -> Losses:
    """The bits of every step that a run has committed so far."""
    lines = [json.loads(line) for line in read_lines(run_dir / "metrics.jsonl")]
    return tuple((line["step"], line["loss_bits"], line["grad_norm_bits"]) for line in lines)


def _struck(run_dir: Path) -> int:
    logs = run_dir.glob("logs/*/stderr.log")
    return sum(log.read_text(errors="replace").count(ANNOUNCED) for log in logs)


def processes_of(run_dir: Path) -> dict[int, int]:
    """Rank -> process id of the workers of a run that are there."""
    mark = f"NTP_RUN_DIR={run_dir}"
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # gone, or somebody else's
            continue
        if mark in variables:
            rank = next(text for text in variables if text.startswith("RANK="))
            found[int(rank.removeprefix("RANK="))] = int(entry.parent.name)
    return found
