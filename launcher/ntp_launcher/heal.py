"""A user's word that devices are well, from `ntp-heal` to the launcher: files in the run directory."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path


def request(run_dir: Path, ranks: Sequence[int]) -> Path:
    """Leaves a request; the launcher of the run takes it away."""
    directory = _directory(run_dir)
    directory.mkdir(exist_ok=True)
    path = directory / f"{time.time_ns()}-{os.getpid()}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(list(ranks)), encoding="utf-8")
    draft.rename(path)
    return path


def take_requests(run_dir: Path) -> list[int]:
    """The ranks of all requests that lie there; they are taken away."""
    ranks: list[int] = []
    for path in sorted(_directory(run_dir).glob("*.json")):
        ranks += json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    return ranks


def _directory(run_dir: Path) -> Path:
    return run_dir / "heal"
