"""What a run leaves behind: `metrics.jsonl`, a line per committed step, and `summary.json` at the end."""

import json
import os
import struct
from pathlib import Path

from ntp.evidence import StateHashes
from ntp.plan import Plan
from ntp.trainer import StepResult, Usage


def bits_of(value: float) -> str:
    """The float64 bit pattern of `value`, 16 hex digits."""
    return struct.pack(">d", value).hex()


def metrics_line(result: StepResult, seconds: float, generation: int) -> dict[str, object]:
    """One line of `metrics.jsonl`."""
    return {
        "step": result.step,
        "loss": result.loss,
        "loss_bits": bits_of(result.loss),
        "grad_norm": result.grad_norm,
        "grad_norm_bits": bits_of(result.grad_norm),
        "lr": result.learning_rate,
        "tokens": result.tokens,
        "step_time_s": round(seconds, 6),
        "tokens_per_s": round(result.tokens / seconds, 1),
        "generation": generation,
    }


def summary(
    plan: Plan, result: StepResult | None, hashes: StateHashes, usage: Usage, wall_s: float
) -> dict[str, object]:
    """The content of `summary.json`; `result` is the last step's."""
    return {
        "steps": result.step if result else 0,
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
    """Appends lines to `metrics.jsonl`; a file from an earlier run in the directory is replaced."""

    def __init__(self, run_dir: Path):
        self._file = (run_dir / "metrics.jsonl").open("w", encoding="utf-8")

    def append(self, line: dict[str, object]) -> None:
        """Write one line, complete on disk before the next step."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def write_json(path: Path, values: dict[str, object]) -> None:
    """Replace `path` in one step, so that no reader sees half a file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105 - the atomic form
