"""What a report is made of: a run directory as one value, also of a run that has not ended, or not well."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntp.config import Config, load_config
from ntp.errors import ConfigError, NtpError
from ntp.run_directory import read_lines


class ReportError(NtpError):
    """A run directory lacks what a run leaves behind."""


Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        steps: the lines of `metrics.jsonl`.
        events: those of `events.jsonl`; empty for a run that an older version wrote.
        summary: {} where the run has not ended well.
    """

    name: str
    config: Config
    steps: tuple[Line, ...]
    events: tuple[Line, ...]
    summary: Line

    @property
    def losses(self) -> tuple[Line, ...]:
        """Changes of membership by a loss."""
        return tuple(event for event in self.events if event["kind"] == "loss")

    @property
    def recoveries(self) -> tuple[Line, ...]:
        """Known times of changes of membership."""
        told = self.summary.get("recoveries")
        values = told if told else [event for event in self.events if event["kind"] == "recovery"]
        return tuple(change for change in values if "unblock" in change)

    @property
    def ending(self) -> str:
        """How the run ended, in a word or a line."""
        ends = [event for event in self.events if event["kind"] == "end"]
        if self.summary:
            return "complete"
        return f"failed: {ends[-1]['text']}" if ends else "running, or ended without a word"


def read_run(path: str) -> Run:
    """The run in a directory. Raises ReportError."""
    folder = Path(path)
    try:
        config = load_config(folder / "resolved.yaml")
    except ConfigError as error:
        raise ReportError(f"{path!r} is not a run directory: {error}") from None
    steps = _lines(folder / "metrics.jsonl")
    if not steps:
        raise ReportError(f"{path!r} has no committed step in metrics.jsonl: there is nothing to report yet")
    summary = folder / "summary.json"
    try:
        ended = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    except ValueError:
        raise ReportError(f"{str(summary)!r} is not JSON") from None
    name = folder.resolve().name
    return Run(name, config, steps, _newest_attempt(_lines(folder / "events.jsonl")), ended)


def _lines(path: Path) -> tuple[Line, ...]:
    try:
        return tuple(json.loads(line) for line in read_lines(path))
    except ValueError:
        raise ReportError(f"{str(path)!r} is not what a run writes: a line is not JSON") from None


def _newest_attempt(events: tuple[Line, ...]) -> tuple[Line, ...]:
    """Events since the newest start: a resumed run appends."""
    starts = [place for place, event in enumerate(events) if event["kind"] == "start"]
    return events[starts[-1] :] if starts else events
