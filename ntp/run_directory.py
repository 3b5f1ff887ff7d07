"""What a run leaves behind: `metrics.jsonl`, a line per committed step, and `summary.json` at the end.

Whoever reads it is told in one line what is missing or damaged.
"""

import json
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ntp.config import Config, load_config
from ntp.errors import NtpError
from ntp.line_file import LineFile
from ntp.plan import Plan

if TYPE_CHECKING:  # whoever only reads a run does without torch
    from ntp.evidence import StateHashes
    from ntp.trainer import StepResult, Usage


METRICS = "metrics.jsonl"
_STEP_KEYS = ("step", "loss", "loss_bits", "tokens_per_s", "generation")
_MOST_RUNS = 5  # named where a folder of runs was given


class RunError(NtpError):
    """A folder is not a run's, or what a run leaves behind is missing or damaged."""


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


class Metrics(LineFile):
    """Appends lines to `metrics.jsonl`, after those that an earlier run there wrote up to `step`.

    Attributes:
        before: the last of those, None where there are none.
    """

    def __init__(self, run_dir: Path, step: int = 0):
        path = run_dir / METRICS
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= step]
        with replacing({path: "".join(kept)}):
            pass
        self.before: dict[str, Any] | None = json.loads(kept[-1]) if kept else None
        super().__init__(path)


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file, each with its end; a last one that was cut off is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def is_run(run_dir: Path) -> bool:
    """Whether a run has been described there."""
    return (run_dir / "resolved.yaml").is_file()


def check_run(run_dir: Path) -> None:
    """Raises RunError for a folder that is not a run's."""
    if not is_run(run_dir):
        runs = sorted(found.parent.name for found in run_dir.glob("*/resolved.yaml"))[-_MOST_RUNS:]
        advice = f"; name one of the runs in it, such as {', '.join(runs)}" if runs else ""
        raise RunError(f"{str(run_dir)!r} is not a run directory: it has no resolved.yaml{advice}")


def read_config(run_dir: Path) -> Config:
    """The configuration of a run. Raises RunError for another folder, ConfigError for what cannot be read."""
    check_run(run_dir)
    return load_config(run_dir / "resolved.yaml")


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none where the file is missing. Raises RunError for a damaged one."""
    return read_objects(run_dir / METRICS, _STEP_KEYS)


def read_objects(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of a `.jsonl` file, which have these keys and may have more. Raises RunError."""
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(
            f"cannot read {str(path)!r}: {getattr(error, 'strerror', 'it is not UTF-8 text')}"
        ) from None
    return [_object(path, number, line, keys) for number, line in enumerate(lines, start=1)]


def _object(path: Path, number: int, line: str, keys: Sequence[str]) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or any(key not in value for key in keys):
        raise RunError(
            f"{str(path)!r} is not what a run writes: line {number} is no JSON object with {', '.join(keys)}"
        )
    return cast("dict[str, Any]", value)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """`summary.json`; {} where the run has not ended well. Raises RunError for a damaged one."""
    path = run_dir / "summary.json"
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{str(path)!r} is not what a run writes: it is not JSON") from None
    if not isinstance(value, dict) or "steps" not in value:
        raise RunError(f"{str(path)!r} is not what a run writes: it is no JSON object with steps")
    return cast("dict[str, Any]", value)


def write_json(path: Path, values: dict[str, object]) -> None:
    """Replace `path` in one step, so that no reader sees half a file."""
    with replacing({path: json.dumps(values, indent=1) + "\n"}):
        pass


@contextmanager
def replacing(texts: Mapping[Path, str]) -> Iterator[None]:
    """Files get a new text, each in one step, at the end; where the disk has no room for all, none does.

    What the context does happens when everything is written and nothing replaced. Raises OSError.
    """
    drafts = {path: path.with_suffix(".tmp") for path in texts}
    try:
        for path, text in texts.items():
            drafts[path].write_text(text, encoding="utf-8")
        yield
        for path, draft in drafts.items():
            os.replace(draft, path)  # noqa: PTH105 - the atomic form
    except OSError:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
        raise
