"""What a report is made of: a run directory as one value, also of a run that has not ended, or not well."""

from dataclasses import dataclass
from pathlib import Path

from ntp.config import Config
from ntp.run_directory import RunError, read_config
from ntp_launcher.run_files import Line, read_events, read_steps, read_summary


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
    """The run in a directory. Raises RunError, also where no step is committed yet, or ConfigError."""
    folder = Path(path)
    config, steps = read_config(folder), read_steps(folder)
    if not steps:
        raise RunError(f"{path!r} has no committed step in metrics.jsonl: there is nothing to report yet")
    events = _newest_attempt(tuple(read_events(folder)))
    return Run(folder.resolve().name, config, tuple(steps), events, read_summary(folder))


def _newest_attempt(events: tuple[Line, ...]) -> tuple[Line, ...]:
    """Events since the newest start: a resumed run appends."""
    starts = [place for place, event in enumerate(events) if event["kind"] == "start"]
    return events[starts[-1] :] if starts else events
