"""Runs that save and resume, on a simulated mesh; and how to damage what they saved."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ntp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from ntp.checkpoint.session import Checkpoints
from ntp.config import Config
from ntp.data import Datasets
from ntp.evidence import StateHashes
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import StepResult, Trainer
from tests.shapes import LLAMA, make_config

SHORT = {"steps": 4, "seq_len": 16, "global_batch": 4}


@dataclass(frozen=True)
class Run:
    """What a run computed itself, how it ended, and what it said."""

    steps: tuple[StepResult, ...]
    hashes: StateHashes
    said: list[str] = field(compare=False)


def saving_config(model=LLAMA, every=2, parallel=None, train=None, **checkpoint) -> Config:
    """A configuration of four steps that saves after every second one."""
    return make_config(
        model,
        parallel=parallel or {"dp": 1, "tp": 1},
        train={**SHORT, **(train or {})},
        checkpoint={"every": every, **checkpoint},
    )


def train(
    config: Config,
    datasets: Datasets,
    run_dir: Path,
    failed: tuple[int, ...] = (),
    resume: str | None = None,
    strict: bool = False,
) -> Run:
    """Train as a worker does, without files other than checkpoints; what the first worker saw."""
    plan = make_plan(config, failed)

    def body(member):
        said: list[str] = []
        checkpoints = Checkpoints(config, run_dir, run_dir / "snapshots", member.mesh, said.append)
        trainer = Trainer(config, plan, member.mesh, datasets, torch.device("cpu"))
        first = checkpoints.start(trainer, resume, strict)
        results = []
        if config.train.last_step == 0:
            checkpoints.after(trainer, 0)
        for step in range(first + 1, config.train.last_step + 1):
            results.append(trainer.step(step, checkpoints.before_commit))
            checkpoints.after(trainer, step)
        hashes = trainer.hashes()
        checkpoints.end(trainer)
        return Run(tuple(results), hashes, said)

    runs = simulate(body, plan)
    first = runs[plan.workers[0]]
    assert all(run.steps == first.steps for run in runs.values())
    return next(run for run in runs.values() if run.hashes.weights_sha256)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def mend(checkpoint: Path) -> Manifest:
    """Rewrite the checksums of a changed checkpoint, so that it passes for sound."""
    manifest = read_manifest(checkpoint)
    pieces = []
    for piece in manifest.pieces:
        with (checkpoint / piece.file).open("rb") as file:
            file.seek(piece.offset)
            digest = hashlib.sha256(file.read(piece.bytes)).hexdigest()
        pieces.append(type(piece).from_json([*piece.to_json()[:-1], digest]))
    mended = Manifest(manifest.step, manifest.config, manifest.shapes, manifest.files, tuple(pieces))
    (checkpoint / MANIFEST).write_text(mended.text())
    return mended


def manifest_body(checkpoint: Path) -> dict:
    """The manifest as plain values, unchecked."""
    return json.loads((checkpoint / MANIFEST).read_text())["manifest"]
