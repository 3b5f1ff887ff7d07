"""Who hears of a run while it goes on: the terminal, `events.jsonl`, and whatever metrics go to.

The leader tells an `Audience` everything once; each listener takes what it needs. `events.jsonl` has a line
per happening (a change of membership, a recovery's times, a save, a warning, the end), each with its time, so
that a report can be made of a run directory alone.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ntp.config import Config
from ntp.line_file import LineFile
from ntp.protocol import Generation
from ntp_launcher.progress import RECOVERY_PARTS, Happening, Progress, Snapshot

_LOOK_S = 0.5  # between two drawings: a faster one is no easier to read
EVENTS = "events.jsonl"
_FAILED = " failed, "  # of a save, as `ntp.checkpoint.save` tells it


class Listener:
    """Takes news of a run; overrides what it needs of it."""

    def step(self, line: Mapping[str, Any]) -> None:
        """A step is committed; `line` is its line of `metrics.jsonl`."""

    def happening(self, happening: Happening) -> None:
        """Something that a user wants to know of."""

    def say(self, line: str) -> None:
        """A result for the terminal."""

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        """Time has passed; `snapshot` makes the present one."""

    def close(self) -> None:
        """There will be no more news."""


class Audience:
    """Everyone who listens to one run.

    Args:
        peak_flops: of one device; None = not known.
    """

    def __init__(
        self, config: Config, run_dir: Path, listeners: Sequence[Listener], peak_flops: float | None = None
    ) -> None:
        self._listeners = listeners
        self._progress = Progress(config, time.time(), peak_flops)
        self._events = LineFile(run_dir / EVENTS)
        self._troubles: dict[str, str] = {}
        self._looked_at = 0.0

    def begin(self, generation: Generation) -> None:
        """The first generation is there."""
        self._progress.begin(generation)
        values = {"generation": generation.generation, "failed": generation.failed}
        self._happen("start", f"generation {generation.generation}", values)

    def opened(self, generation: Generation, members: int, total: int) -> None:
        """Membership has changed."""
        self._progress.opened(generation, time.time())
        kind = "join" if generation.at_boundary else "loss"
        text = f"{generation.cause}; generation {generation.generation} has {members} of {total} ranks"
        values = {"generation": generation.generation, "failed": generation.failed}
        self._happen(kind, text, values)

    def coming(self, ranks: Iterable[int]) -> None:
        """The ranks whose processes are on their way, at this moment."""
        self._progress.coming(ranks)

    def committed(self, line: Mapping[str, Any]) -> None:
        """A step is done."""
        self._progress.committed(line)
        for listener in self._listeners:
            listener.step(line)
        self.noted(line.get("notes", ()))

    def noted(self, notes: Iterable[str]) -> None:
        """What the workers have to say."""
        for note in notes:
            self._happen(_kind_of(note), note)

    def recovered(self, change: Mapping[str, Any]) -> None:
        """The times of a change of membership are known (as in `summary.json`)."""
        known = [(part, float(change[part])) for part in RECOVERY_PARTS if part in change]
        told = ", ".join(f"{part} {seconds:.2f}" for part, seconds in known if seconds >= 0.005)
        total = sum(seconds for _, seconds in known)
        text = f"generation {change['generation']} went on after {total:.2f} s" + f" ({told})" * bool(told)
        self._happen("recovery", text, change)

    def warn(self, text: str) -> None:
        """Something that a user should look at."""
        self._happen("warning", text)

    def troubled(self, name: str, trouble: str) -> None:
        """Lines of a file cannot be written, or can be again (""); told where that is new."""
        before, self._troubles[name] = self._troubles.get(name, ""), trouble
        if trouble and not before:
            self.warn(f"{name} cannot be written ({trouble}); its lines are kept until it can")
        elif before and not trouble:
            self.noted([f"{name} is written again"])

    def ended(self, code: int, reason: str) -> None:
        """The job is over."""
        self._happen("end", reason or "complete", {"code": code})

    def say(self, line: str) -> None:
        """A result."""
        for listener in self._listeners:
            listener.say(line)

    def look(self) -> None:
        """Lets the listeners draw, now and then."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            for listener in self._listeners:
                listener.look(self.snapshot)

    def snapshot(self) -> Snapshot:
        """The run at this moment."""
        return self._progress.snapshot(time.time())

    def close(self) -> None:
        """Ends everything, with one last look."""
        for listener in self._listeners:
            listener.look(self.snapshot)
            listener.close()
        self._events.close()

    def _happen(self, kind: str, text: str, values: Mapping[str, Any] | None = None) -> None:
        happening = Happening(time.time(), kind, text, values or {})
        self._progress.happened(happening)
        told = {"time": round(happening.time, 3), "kind": kind, "text": text}
        line = {**told, **happening.values, **told}  # a recovery has a kind of its own
        self._events.append(json.dumps(line))
        for listener in self._listeners:
            listener.happening(happening)
        self.troubled(EVENTS, self._events.trouble)


def _kind_of(note: str) -> str:
    if not note.startswith("checkpoint"):
        return "note"
    return "warning" if _FAILED in note else "save"
