"""Run one job on several meshes: the bits of each, and its speed beside that of the healthy mesh.

    python -m tests.bench.meshes configs/1b-4xh100.yaml 2x2 2x2:3 2x2:0,3 1x3 4x1 --set train.steps=20
    python -m tests.bench.meshes configs/1b-4xh100.yaml 2x2@NCCL_ALGO=Ring 2x2@NCCL_ALGO=Tree

A mesh is `dp x tp`, then the failed ranks after a colon, then environment variables, each after an `@`. Each
run is `ntp-launch` of its own. `share` is tokens per second over (live ranks / ranks) of what the same mesh
made with nothing failed, if that ran before. Exit code 1 if a run fails or a bit of its result differs from
the first's.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntp_launcher.progress import RECOVERY_PARTS

_MESH = re.compile(r"(?P<dp>\d+)x(?P<tp>\d+)(?::(?P<failed>\d+(?:,\d+)*))?(?P<variables>(?:@\w+=[^@]*)*)")
_WARM = 3
"""Steps that come before those whose speed counts."""

_EVENTS = 12
"""Of a run that did not end, as many of the last ones are shown."""


@dataclass(frozen=True)
class Case:
    """A mesh, the ranks that it lacks, and what is set in the environment."""

    name: str
    dp: int
    tp: int
    failed: tuple[int, ...]
    variables: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "Case":
        found = _MESH.fullmatch(text)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mesh: expected 2x2, 2x2:3 or 2x2:0,3@NAME=VALUE"
            )
        failed = tuple(int(rank) for rank in (found["failed"] or "").split(",") if rank)
        variables = dict(pair.split("=", 1) for pair in found["variables"].split("@")[1:])
        return cls(text, int(found["dp"]), int(found["tp"]), failed, variables)

    @property
    def alive(self) -> float:
        """Live ranks over ranks."""
        return 1 - len(self.failed) / (self.dp * self.tp)

    def command(self, config: str, overrides: Sequence[str], run_dir: Path) -> list[str]:
        settings = [f"parallel.dp={self.dp}", f"parallel.tp={self.tp}", *overrides]
        failed = ["--failed", ",".join(map(str, self.failed))] if self.failed else []
        sets = [part for setting in settings for part in ("--set", setting)]
        return [sys.executable, "-m", "ntp_launcher", config, "--run-dir", str(run_dir), *failed, *sets]


@dataclass(frozen=True)
class Row:
    """What a run ended with; `step_s` is the median step."""

    case: Case
    weights: str
    state: str
    loss_bits: str
    step_s: float
    tokens_per_s: float
    wall_s: float
    recoveries: tuple[str, ...]


def read(case: Case, run_dir: Path, wall_s: float) -> Row:
    """The row of a run that is complete."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    timed = [line for line in lines if line["step_time_s"] is not None]
    timed = timed[_WARM:] or timed
    step_s = statistics.median(line["step_time_s"] for line in timed)
    speed = statistics.median(line["tokens"] for line in timed) / step_s
    recoveries = tuple(_told(recovery) for recovery in summary.get("recoveries", ()))
    hashes = (summary["weights_sha256"], summary["state_sha256"], summary["loss_bits"])
    return Row(case, *hashes, step_s, speed, wall_s, recoveries)


def share(row: Row, before: Sequence[Row]) -> float | None:
    """Speed over the live share of the healthy mesh's; None where that did not run before."""
    for healthy in before:
        same = (healthy.case.dp, healthy.case.tp) == (row.case.dp, row.case.tp)
        if same and not healthy.case.failed:
            return row.tokens_per_s / (healthy.tokens_per_s * row.case.alive)
    return None


def differs(row: Row, first: Row) -> bool:
    """Whether a bit of the result moved."""
    return (row.weights, row.state, row.loss_bits) != (first.weights, first.state, first.loss_bits)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; one line each."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("config")
    options.add_argument("meshes", nargs="+", type=Case.parse)
    options.add_argument("--set", action="append", default=[], help="for every run, as of ntp-launch")
    options.add_argument("--limit", type=float, default=600, help="seconds of a run")
    given = options.parse_args(argv)
    rows: list[Row] = []
    complete = True
    with tempfile.TemporaryDirectory(prefix="ntp-meshes-") as scratch:
        for place, case in enumerate(given.meshes):
            row = _run(case, given.config, given.set, Path(scratch) / str(place), given.limit)
            if row is None:
                complete = False
                continue
            print(_line(row, rows), flush=True)
            rows.append(row)
    return 0 if complete and not any(differs(row, rows[0]) for row in rows) else 1


def _run(case: Case, config: str, overrides: Sequence[str], run_dir: Path, limit_s: float) -> Row | None:
    began = time.monotonic()
    command = case.command(config, overrides, run_dir)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **case.variables},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{case.name}: did not end within {limit_s:.0f} s{_last_events(run_dir)}", flush=True)
        return None
    if done.returncode:
        print(f"{case.name}: exit code {done.returncode}: {(done.stderr or done.stdout)[-800:]}", flush=True)
        return None
    return read(case, run_dir, time.monotonic() - began)


def _last_events(run_dir: Path) -> str:
    """What a run that did not end has told last."""
    events = run_dir / "events.jsonl"
    lines = events.read_text().splitlines()[-_EVENTS:] if events.exists() else []
    told = [json.loads(line) for line in lines]
    return "".join(
        f"\n    {one['time'] - told[0]['time']:+7.1f} s {one['kind']}: {one['text']}" for one in told
    )


def _line(row: Row, before: Sequence[Row]) -> str:
    speed = f"{row.step_s * 1e3:9.1f} ms {row.tokens_per_s:10.0f} tok/s"
    part = share(row, before)
    shared = f" share {part:.3f}" if part is not None and row.case.failed else ""
    verdict = " DIFFERS" if before and differs(row, before[0]) else ""
    told = "".join(f"\n    {recovery}" for recovery in row.recoveries)
    hashes = f"{row.weights[:16]} {row.state[:12]} {row.loss_bits}"
    return f"{row.case.name:24s} {hashes} {speed}{shared} ({row.wall_s:.0f} s){verdict}{told}"


def _told(change: dict[str, Any]) -> str:
    """What a change of membership took; one in which no step was made has no source."""
    known = {name: change[name] for name in RECOVERY_PARTS if name in change}
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in known.items())
    source = f"from {change['source']}" if "source" in change else "no step was made in it"
    return f"{change['cause']}: {sum(known.values()):.2f} s ({parts}), {source}"


if __name__ == "__main__":
    sys.exit(main())
