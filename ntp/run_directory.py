"""What a run leaves behind: `metrics.jsonl`, a line per committed step, and `summary.json` at the end."""

import json
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ntp.plan import Plan

if TYPE_CHECKING:  # whoever only reads a run does without torch
    from ntp.evidence import StateHashes
    from ntp.trainer import StepResult, Usage


def bits_of(value: float) -> str:
    """The float64 bit pattern of `value`, 16 hex digits."""
    return struct.pack(">d", value).hex()


def metrics_line(result: "StepResult", seconds: float | None, generation: int) -> dict[str, object]:
    """One line of `metrics.jsonl`; `seconds` is None where whoever measured the step has gone."""
    return {
        "step": result.step,
        "loss": result.loss,
        "loss_bits": bits_of(result.loss),
        "grad_norm": result.grad_norm,
        "grad_norm_bits": bits_of(result.grad_norm),
        "lr": result.learning_rate,
        "tokens": result.tokens,
        "step_time_s": None if seconds is None else round(seconds, 6),
        "tokens_per_s": None if seconds is None else round(result.tokens / seconds, 1),
        "generation": generation,
        "time": round(time.time(), 3),
    }


def summary(
    plan: Plan, step: int, result: "StepResult | None", hashes: "StateHashes", usage: "Usage", wall_s: float
) -> dict[str, object]:
    """The content of `summary.json`; `step` is the last one, `result` its own where this run computed it."""
    return {
        "steps": step,
        "loss": result.loss if result else None,
        "loss_bits": bits_of(result.loss) if result else None,
        "weights_sha256": hashes.weights_sha256,
        "state_sha256": hashes.state_sha256,
        "world_size": len(plan.workers),
        "degrees": {str(replica.index): replica.degree for replica in plan.replicas},
        "parameter_bytes": usage.parameter_bytes,
        "gemm_flops": usage.gemm_flops,
        "wall_s": round(wall_s, 3),
    }


class Metrics:
    """Appends lines to `metrics.jsonl`, after those that an earlier run there wrote up to `step`."""

    def __init__(self, run_dir: Path, step: int = 0):
        path = run_dir / "metrics.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: str) -> None:
        """Write one line of JSON, complete on disk before the next step."""
        self._file.write(f"{line}\n")
        self._file.flush()

    def close(self) -> None:
        """Give the file up."""
        self._file.close()


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file, each with its end; a last one that was cut off is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def write_json(path: Path, values: dict[str, object]) -> None:
    """Replace `path` in one step, so that no reader sees half a file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105 - the atomic form
