"""What the leader keeps of a run: a line per committed step, the recoveries, the summary.

Workers leave the metrics of a step in the store, some of them twice after a loss; each step is taken from
there once and in order, written to `metrics.jsonl` and deleted. A line that is written is complete on disk
before the next is begun.
"""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from ntp.protocol import (
    FINISHED,
    STARTED,
    Generation,
    RecoveryTimes,
    metrics_key,
    recovery_key,
    snapshot_directory,
)
from ntp.run_directory import METRICS, Metrics, write_json
from ntp_launcher.audience import Audience
from ntp_launcher.events import StepCommitted
from ntp_launcher.job import Job, describe_job, writing
from ntp_launcher.mail import peek, read_json, take

_PLACES = 4


@dataclass(slots=True)
class _Change:
    """A change of membership, and how long it took where that is known."""

    generation: Generation
    detect: float
    agree: float
    times: RecoveryTimes | None = None

    def to_json(self) -> dict[str, Any]:
        """As in `summary.json`; without times where another loss cut it short, or the run ended first."""
        values: dict[str, Any] = {
            "generation": self.generation.generation,
            "kind": "join" if self.generation.at_boundary else "loss",
            "cause": self.generation.cause,
            "detect": round(self.detect, _PLACES),
            "agree": round(self.agree, _PLACES),
        }
        if self.times is not None:
            times = {name: getattr(self.times, name) for name in ("unblock", "rebuild", "move", "replay")}
            values |= {name: round(seconds, _PLACES) for name, seconds in times.items()}
            values |= {
                "bytes_moved": self.times.bytes_moved,
                "steps_replayed": self.times.steps_replayed,
                "source": self.times.source,
            }
        return values


class Ledger:
    """The leader's books; `audience` hears what is written down.

    Args:
        resumes: the run goes on from a checkpoint, so that the workers have to say from where.
    """

    def __init__(self, job: Job, run_dir: Path, store: Store, resumes: bool, audience: Audience) -> None:
        self._job, self._run_dir, self._store, self._audience = job, run_dir, store, audience
        self._resumes = resumes
        self._metrics: Metrics | None = None
        self._step = 0
        self._productive_s = 0.0
        self._begun = time.monotonic()
        self._changes: list[_Change] = []
        self._clear_snapshots()  # an earlier run's would not be of this one's steps

    def note(self, generation: Generation, detect_s: float) -> None:
        """A new generation has been opened."""
        agree = time.time() - generation.detected_at
        self._changes.append(_Change(generation, detect_s, agree))

    def committed(self) -> list[StepCommitted]:
        """Writes down the steps that have been committed since the last call."""
        done: list[StepCommitted] = []
        if self._metrics is None:
            self._begin()
        while self._metrics is not None:
            text = take(self._store, metrics_key(self._step + 1))
            if text is None:
                break
            self._step += 1
            line = json.loads(text)
            self._metrics.append(text)
            self._productive_s += line["step_time_s"] or 0.0
            self._audience.committed(line)
            done.append(StepCommitted(self._step, line["generation"]))
        if done:
            self._take_times()
        if self._metrics is not None:
            self._audience.troubled(METRICS, self._metrics.trouble)
        return done

    def finish(self) -> str:
        """Writes `summary.json`, once the run is complete.

        Returns:
            What could not be written, and why; "" where everything is.
        """
        self.committed()
        self._take_times()
        told = self._with_loss(read_json(self._store, FINISHED) or {})
        self._audience.noted(told.pop("notes", ()))
        wall_s = time.monotonic() - self._begun
        summary = {
            **told,
            "wall_s": round(wall_s, 3),
            "generations": 1 + len(self._changes),
            "recoveries": [change.to_json() for change in self._changes],
            "goodput": round(self._productive_s / wall_s, _PLACES),
        }
        if "weights_sha256" in summary:
            self._audience.say(f"weights_sha256 {summary['weights_sha256']}")
        return self._write(summary)

    def close(self) -> None:
        """Gives the file and the snapshots up."""
        if self._metrics is not None:
            self._metrics.close()
        self._clear_snapshots()

    def _with_loss(self, told: dict[str, Any]) -> dict[str, Any]:
        """A run that had no step left to compute has the loss that an earlier one wrote down."""
        before = self._metrics and self._metrics.before
        if told.get("loss") is None and before and before["step"] == told.get("steps"):
            return {**told, "loss": before["loss"], "loss_bits": before["loss_bits"]}
        return told

    def _write(self, summary: dict[str, Any]) -> str:
        try:
            write_json(self._run_dir / "summary.json", summary)
        except OSError as error:
            return f"summary.json cannot be written: {error.strerror}"
        if self._metrics is not None:
            self._metrics.flush()
            if self._metrics.trouble:
                return f"{METRICS} cannot be written: {self._metrics.trouble}"
        return ""

    def _clear_snapshots(self) -> None:
        shutil.rmtree(snapshot_directory(self._run_dir), ignore_errors=True)

    def _begin(self) -> None:
        """Opens the file, as soon as it is known which of its lines are of earlier runs.

        From then on the run directory tells of this run.
        """
        started = peek(self._store, STARTED)
        if started is None and self._resumes:
            return
        self._step = int(started or 0)
        with writing(str(self._run_dir)):
            self._metrics = Metrics(self._run_dir, self._step)
        if self._resumes:
            describe_job(self._job, self._run_dir)

    def _take_times(self) -> None:
        for change in self._changes:
            if change.times is None:
                text = take(self._store, recovery_key(change.generation.generation))
                if text is not None:
                    change.times = RecoveryTimes.from_json(text)
                    self._audience.recovered(change.to_json())
