"""Random faults over random meshes: every run must end with the bits of an unfailed one.

    python -m ntp.testing.campaign --faults 200 --seed 0

Each run goes through the real launcher with up to three faults (`ntp.faults`), on a mesh of at least four
ranks drawn at random, so that somebody always survives. Since no mesh and no fault may change a bit, one
unfailed run on one rank is the reference for all of them. A run fails if its hashes or losses differ, if it
does not end in time, or if it leaves a process behind.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ntp.protocol import Phase

_STEPS = 6
_CONFIG: dict[str, Any] = {
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
    "train": {"steps": _STEPS, "seq_len": 48, "global_batch": 6, "device": "cpu", "timeout_s": 20},
    "checkpoint": {"every": 2},
    "elastic": {"step_timeout_s": 25.0, "checkpoint_timeout_s": 30.0, "startup_timeout_s": 120.0},
}
_MESHES = ((2, 2), (2, 3), (3, 2), (4, 1))
_KINDS = ("kill", "segfault", "terminate", "exit", "exception", "out_of_memory", "nan", "stop")
_PHASES = (Phase.STEP, Phase.EXCHANGE, Phase.VOTE, Phase.UPDATE, Phase.CHECKPOINT, Phase.MOVING)
_EVIDENCE = ("weights_sha256", "state_sha256", "loss_bits")
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a mesh and the faults that strike it."""

    dp: int
    tp: int
    faults: tuple[Mapping[str, Mapping[str, object]], ...]

    def describe(self) -> str:
        """One line."""
        struck = "; ".join(
            f"{kind} rank {place['rank']} in {place['phase']} of step {place['step']}"
            for fault in self.faults
            for kind, place in fault.items()
        )
        return f"{self.dp}x{self.tp}: {struck}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `problem` is empty where it kept every promise."""

    problem: str
    recoveries: int
    seconds: float


def trials(faults: int, seed: int) -> Iterator[Trial]:
    """Trials with `faults` faults altogether; a function of its arguments."""
    draw = random.Random(seed)
    left = faults
    while left > 0:
        dp, tp = draw.choice(_MESHES)
        count = min(left, draw.randint(1, 3))
        left -= count
        yield Trial(dp, tp, tuple(_fault(draw, dp * tp) for _ in range(count)))


def _fault(draw: random.Random, ranks: int) -> Mapping[str, Mapping[str, object]]:
    kind = draw.choice(_KINDS)
    phase = Phase.STEP if kind == "nan" else draw.choice(_PHASES)
    place = {"rank": draw.randrange(ranks), "step": draw.randint(1, _STEPS), "phase": phase.value}
    return {kind: place}


def run_trial(trial: Trial, directory: Path, reference: Mapping[str, object]) -> Outcome:
    """Run one trial in `directory` and compare it with the reference."""
    started = time.monotonic()
    summary, problem = _launch(trial, directory)
    seconds = time.monotonic() - started
    if not problem:
        wrong = [name for name in _EVIDENCE if summary[name] != reference[name]]
        problem = f"{', '.join(wrong)} differ" if wrong else ""
    left = _processes_of(directory)
    if left:
        problem = f"{problem}; processes {left} are left".lstrip("; ")
    return Outcome(problem, len(summary.get("recoveries", [])), seconds)


def reference_run(directory: Path) -> Mapping[str, object]:
    """The evidence of the unfailed run on one rank."""
    summary, problem = _launch(Trial(1, 1, ()), directory)
    assert not problem, problem
    return summary


def _launch(trial: Trial, directory: Path) -> tuple[Mapping[str, Any], str]:
    directory.mkdir(parents=True)
    config = directory / "config.yaml"
    parallel = {"dp": trial.dp, "tp": trial.tp}
    config.write_text(
        yaml.safe_dump(_CONFIG | {"parallel": parallel, "faults": [dict(f) for f in trial.faults]})
    )
    command = [sys.executable, "-m", "ntp_launcher", str(config), "--run-dir", str(directory / "run")]
    with (directory / "output").open("wb") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return {}, f"did not end within {_DEADLINE_S:.0f} s"
    summary = directory / "run" / "summary.json"
    if done.returncode or not summary.exists():
        last = (directory / "output").read_text(errors="replace").strip().splitlines()[-1:]
        return {}, f"exit code {done.returncode}: {' '.join(last)}"
    return json.loads(summary.read_text()), ""


def _processes_of(directory: Path) -> list[int]:
    """Processes that were started for a run in `directory` and are still there."""
    mark = f"NTP_RUN_DIR={directory}".encode()
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:  # gone, or somebody else's
            continue
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if any run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="faults altogether (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    failures, struck, recoveries, began = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ntp-campaign-") as scratch:
        reference = reference_run(Path(scratch) / "reference")
        for number, trial in enumerate(trials(args.faults, args.seed)):
            outcome = run_trial(trial, Path(scratch) / str(number), reference)
            failures += bool(outcome.problem)
            struck += len(trial.faults)
            recoveries += outcome.recoveries
            verdict = outcome.problem or f"same bits, {outcome.recoveries} changes of membership"
            sys.stdout.write(f"{trial.describe()}\n    {verdict} ({outcome.seconds:.1f} s)\n")
            sys.stdout.flush()
    minutes = (time.monotonic() - began) / 60
    sys.stdout.write(
        f"{struck} faults, {recoveries} changes of membership, {failures} failures in {minutes:.1f} min\n"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
