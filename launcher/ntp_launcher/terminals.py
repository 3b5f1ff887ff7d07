"""What the terminal shows of a run: the live view, plain lines, JSON lines, or failures alone."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ntp.config import Config
from ntp_launcher.audience import Listener
from ntp_launcher.live import render
from ntp_launcher.progress import Happening, Snapshot

LogFormat = Literal["text", "json"]
_LOUD = ("loss", "join", "warning")
_QUIET = ("loss", "warning")


def terminal(config: Config, quiet: bool, log_format: LogFormat) -> Listener:
    """The listener that fits: a live view where stdout is a terminal and lines are not asked for."""
    if log_format == "json":
        return JsonLines(config, quiet)
    console = Console()
    if quiet or not console.is_terminal or console.is_dumb_terminal:
        return Lines(config, quiet)
    return View(console)


class Lines(Listener):
    """One plain line a step on stdout, losses and warnings on stderr; quiet: the latter alone."""

    def __init__(self, config: Config, quiet: bool = False) -> None:
        self._every, self._last, self._steps = config.log.every, config.train.last_step, config.train.steps
        self._quiet = quiet

    def step(self, line: Mapping[str, Any]) -> None:
        """One line on stdout, every `log.every` steps and for the last."""
        if not self._quiet and (line["step"] % self._every == 0 or line["step"] == self._last):
            self.say(step_line(line, self._steps))

    def happening(self, happening: Happening) -> None:
        """Losses, joins and warnings on stderr, the times of a recovery on stdout."""
        if happening.kind in (_QUIET if self._quiet else _LOUD):
            sys.stderr.write(f"ntp-launch: {happening.text}\n")
            sys.stderr.flush()
        elif happening.kind == "recovery" and not self._quiet:
            self.say(happening.text)

    def say(self, line: str) -> None:
        """The line itself."""
        if not self._quiet:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


class JsonLines(Lines):
    """The same as JSON on stdout, for programs: every line an object with `kind`."""

    def step(self, line: Mapping[str, Any]) -> None:
        """The line of `metrics.jsonl`, as `kind: step`."""
        if not self._quiet and (line["step"] % self._every == 0 or line["step"] == self._last):
            self._write({"kind": "step", **line})

    def happening(self, happening: Happening) -> None:
        """As in `events.jsonl`."""
        if not self._quiet or happening.kind in _QUIET:
            told = {"time": round(happening.time, 3), "kind": happening.kind, "text": happening.text}
            self._write({**told, **happening.values, **told})

    def say(self, line: str) -> None:
        """A `kind: note`."""
        if not self._quiet:
            self._write({"kind": "note", "text": line})

    def _write(self, values: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


class View(Listener):
    """The live view. What others write to stdout and stderr appears above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unicode = not console.options.ascii_only
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def say(self, line: str) -> None:
        """Above the view, where it stays."""
        self._console.print(line, markup=False, highlight=False)

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        """Draws the view anew, in the terminal's present size."""
        if not self._live.is_started:  # hides the cursor, which only `close` gives back
            self._live.start()
        size = self._console.size
        lines = render(snapshot(), size.width, size.height - 1, self._unicode)
        self._live.update(_Drawing(lines), refresh=True)

    def close(self) -> None:
        """Leaves the last drawing where it is and gives the cursor back."""
        self._live.stop()


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Lines that fit already; rich would spend half of the time in looking for words to wrap."""

    lines: Sequence[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line.render(console, "\n")


def step_line(line: Mapping[str, Any], steps: int) -> str:
    """One plain line about a step, from its metrics."""
    held_out = f"  held-out {line['held_out_loss']:.4f}" if "held_out_loss" in line else ""
    rate = "" if line["tokens_per_s"] is None else f"  {line['tokens_per_s']} tokens/s"
    return (
        f"step {line['step']}/{steps}  loss {line['loss']:.4f}{held_out}"
        f"  grad norm {line['grad_norm']:.3f}  lr {line['lr']:.2e}{rate}"
    )
