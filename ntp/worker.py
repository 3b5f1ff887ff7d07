"""Entry point of a worker process, and the only reader of its environment.

The launcher sets RANK (the base-mesh rank), LOCAL_RANK, MASTER_ADDR, MASTER_PORT, NTP_CONFIG (JSON),
NTP_FAILED, NTP_RUN_DIR, NTP_RESUME and NTP_STRICT. Every worker derives the same plan from them. A standby
joins the world and waits.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from ntp.checkpoint.session import Checkpoints
from ntp.collectives import Mesh, build_mesh
from ntp.config import Config, parse_config
from ntp.data import open_datasets
from ntp.plan import Plan, make_plan
from ntp.process_groups import joined_world
from ntp.run_directory import Metrics, metrics_line, summary, write_json
from ntp.trainer import StepResult, Trainer

_FINISHED = "ntp/finished"
_STANDBY_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the launcher tells a worker."""

    rank: int
    local_rank: int
    config: Config
    failed: frozenset[int]
    run_dir: Path
    resume: str | None
    strict: bool

    @classmethod
    def from_environment(cls) -> "Surroundings":
        failed = os.environ.get("NTP_FAILED", "")
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            config=parse_config(os.environ["NTP_CONFIG"]),
            failed=frozenset(int(rank) for rank in failed.split(",") if rank),
            run_dir=Path(os.environ["NTP_RUN_DIR"]),
            resume=os.environ.get("NTP_RESUME") or None,
            strict=os.environ.get("NTP_STRICT") == "1",
        )


def main() -> None:
    """Run this worker to the end of training."""
    started = time.monotonic()
    here = Surroundings.from_environment()
    plan = make_plan(here.config, here.failed)
    device = choose_device(here.config.train.device, here.local_rank)
    torch.set_num_threads(1)  # a second thread would cut reductions elsewhere
    with joined_world(plan.world, here.rank, device, here.config.train.timeout_s) as (fabric, store):
        mesh = build_mesh(plan, here.rank, fabric)
        if mesh is None:
            _stand_by(store)
        else:
            _train(here, plan, mesh, device, started)
            store.set(_FINISHED, "1")


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of `train.device`: `auto` takes the GPU with this local rank where there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _stand_by(store: Store) -> None:
    while not store.check([_FINISHED]):
        time.sleep(_STANDBY_POLL_S)


def _train(here: Surroundings, plan: Plan, mesh: Mesh, device: torch.device, started: float) -> None:
    config, reports = here.config, here.rank == plan.reporter
    datasets = open_datasets(
        [(path.path, path.weight) for path in config.data.path or ()],
        source=config.data.source,
        tokenizer=config.data.tokenizer,
        held_out=config.data.held_out,
        sequence_length=config.train.seq_len,
        seed=config.train.seed,
        cache_dir=here.run_dir / "tokens",
    )
    trainer = Trainer(config, plan, mesh, datasets, device)
    checkpoints = Checkpoints(config, here.run_dir, mesh, say=_say if reports else lambda line: None)
    step = first = checkpoints.start(trainer, here.resume, here.strict)
    metrics = Metrics(here.run_dir, first) if reports else None
    result = None
    if config.train.last_step == 0:
        checkpoints.after(trainer, 0)
    for step in range(first + 1, config.train.last_step + 1):
        before = time.monotonic()
        result = trainer.step(step, checkpoints.before_commit)
        held_out = trainer.evaluate() if _is_due(step, config.train.eval_every) else None
        if metrics:
            line = metrics_line(result, time.monotonic() - before, plan.generation)
            metrics.append(line if held_out is None else {**line, "held_out_loss": held_out})
            if _is_due(step, config.log.every) or step == config.train.last_step:
                _say(_step_line(config, result, line["tokens_per_s"], held_out))
        checkpoints.after(trainer, step)
    hashes, usage = trainer.hashes(), trainer.usage()
    if reports:
        write_json(
            here.run_dir / "summary.json",
            summary(plan, step, result, hashes, usage, time.monotonic() - started),
        )
        _say(f"weights_sha256 {hashes.weights_sha256}")
    checkpoints.end()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step_line(config: Config, result: StepResult, tokens_per_s: object, held_out: float | None) -> str:
    """One plain line about a step."""
    evaluated = "" if held_out is None else f"  held-out {held_out:.4f}"
    return (
        f"step {result.step}/{config.train.steps}  loss {result.loss:.4f}{evaluated}"
        f"  grad norm {result.grad_norm:.3f}  lr {result.learning_rate:.2e}  {tokens_per_s} tokens/s"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
