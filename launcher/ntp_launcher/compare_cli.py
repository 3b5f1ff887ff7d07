"""`ntp-compare RUN_A RUN_B`: are two runs the same, step by step?

Settings that decide the bits are compared first, then every step that both runs have computed (a resumed run
has only the later ones), then how they ended. What cannot move a bit (the mesh, faults, logging,
checkpoints) may differ. Exit code: 0 no difference, 1 the first difference, which is named, 2 a run cannot
be read.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ntp.run_directory import RunError, read_config
from ntp_launcher.ending import ending
from ntp_launcher.flags import OneLineParser
from ntp_launcher.paths import path_name
from ntp_launcher.run_files import Line, read_steps, read_summary

_FREE_SECTIONS = ("parallel", "checkpoint", "elastic", "faults", "log")
_FREE_KEYS = (
    "optimizer.copies",
    "train.timeout_s",
    "train.stop_after",
    "train.profile",
    "train.eval_every",
    "data.eval_sequences",
)
_STEP_KEYS = ("loss_bits", "grad_norm_bits", "tokens", "lr", "held_out_loss")
_END_KEYS = ("steps", "weights_sha256", "state_sha256")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-compare", lambda: _compare(build_parser().parse_args(argv)))


def _compare(args: argparse.Namespace) -> int:
    a, b = Path(args.run_a), Path(args.run_b)
    difference = next(differences(a, b), None)
    steps = sorted(_steps(a).keys() & _steps(b).keys())
    if difference is not None:
        sys.stdout.write(f"different: {difference}\n")
        return 1
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no step in common"
    sys.stdout.write(f"equal: {span}, weights and optimizer state\n")
    return 0


def build_parser() -> OneLineParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-compare", description="Compare losses, hashes and configs of two runs.", allow_abbrev=False
    )
    parser.add_argument("run_a", type=path_name, metavar="RUN_DIR", help="what ntp-launch wrote")
    parser.add_argument("run_b", type=path_name, metavar="RUN_DIR", help="the other run")
    return parser


def differences(a: Path, b: Path) -> Iterator[str]:
    """What differs between two run directories, the earliest first."""
    yield from _config_differences(_settings(a), _settings(b))
    steps_a, steps_b = _steps(a), _steps(b)
    for step in sorted(steps_a.keys() & steps_b.keys()):
        for key in _STEP_KEYS:
            left, right = steps_a[step].get(key), steps_b[step].get(key)
            if left != right and None not in (left, right):
                yield f"step {step}: {key} {left} and {right}"
    yield from _gaps(a, b, steps_a, steps_b)
    end_a, end_b = _summary(a), _summary(b)
    for key in _END_KEYS:
        if end_a.get(key) != end_b.get(key):
            yield f"at the end: {key} {end_a.get(key)} and {end_b.get(key)}"


def _config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in [*a, *(key for key in b if key not in a)]:
        if key.partition(".")[0] not in _FREE_SECTIONS and key not in _FREE_KEYS and a.get(key) != b.get(key):
            yield f"config: {key} {json.dumps(a.get(key))} and {json.dumps(b.get(key))}"


def _gaps(a: Path, b: Path, steps_a: Mapping[int, Line], steps_b: Mapping[int, Line]) -> Iterator[str]:
    """Steps that one run has and the other, which began before, has not."""
    for path, mine, others in ((a, steps_a, steps_b), (b, steps_b, steps_a)):
        if not mine and others:
            yield f"{str(path)!r} has no steps"
        for step in sorted(others):
            if mine and step > min(mine) and step not in mine:
                yield f"step {step}: missing in {str(path)!r}"
                break


def _settings(run: Path) -> dict[str, Any]:
    """Dotted key -> value."""
    return dict(_flat("", read_config(run).model_dump(mode="json")))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value


def _steps(run: Path) -> dict[int, Line]:
    """The lines of `metrics.jsonl` by step."""
    return {line["step"]: line for line in read_steps(run)}


def _summary(run: Path) -> dict[str, Any]:
    summary = read_summary(run)
    if not summary:
        raise RunError(f"{str(run)!r} has no summary.json: the run has not ended well")
    return summary


if __name__ == "__main__":
    sys.exit(main())
