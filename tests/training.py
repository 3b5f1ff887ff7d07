"""Train a few steps on a simulated mesh."""

from dataclasses import dataclass

import torch

from ntp.config import Config
from ntp.data import Datasets
from ntp.evidence import StateHashes
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import StepResult, Trainer, Usage


@dataclass(frozen=True)
class Run:
    """What a run must share with every other run of the same configuration."""

    steps: tuple[StepResult, ...]
    hashes: StateHashes
    usage: Usage


def train(config: Config, datasets: Datasets, failed: tuple[int, ...] = (), steps: int | None = None) -> Run:
    """Train on the mesh of `config` without the failed ranks; what the first worker saw."""
    plan = make_plan(config, failed)

    def body(member):
        trainer = Trainer(config, plan, member.mesh, datasets, torch.device("cpu"))
        results = tuple(trainer.step(step) for step in range(1, (steps or config.train.steps) + 1))
        return Run(results, trainer.hashes(), trainer.usage())

    runs = simulate(body, plan)
    first = runs[plan.reporter]
    assert all(run.steps == first.steps for run in runs.values())
    return first
