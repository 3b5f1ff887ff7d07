"""The live view: a pure function of a snapshot and a size, so that it can be looked at without a terminal.

Lines are built by hand and not from rich's tables: it is drawn beside the job, several times a second, and a
table costs ten times as much. Nothing wraps: what has no room is left out, the least important first.
"""

from collections.abc import Iterator
from itertools import islice
from time import localtime, strftime

from rich.cells import cell_len
from rich.text import Text

from ntp_launcher.progress import Happening, Mark, ReplicaMarks, Snapshot

_GLYPHS = {Mark.LIVE: "●", Mark.STANDBY: "○", Mark.COMING: "◌", Mark.RECOVERING: "◍", Mark.LOST: "✗"}
_PLAIN = {Mark.LIVE: "#", Mark.STANDBY: "o", Mark.COMING: "~", Mark.RECOVERING: "*", Mark.LOST: "x"}
_STYLES = {
    Mark.LIVE: "green",
    Mark.STANDBY: "cyan",
    Mark.COMING: "yellow",
    Mark.RECOVERING: "yellow",
    Mark.LOST: "bold red",
}
_KINDS = {"loss": "bold red", "warning": "yellow", "join": "green", "recovery": "green"}
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*#@"


def render(snapshot: Snapshot, width: int, height: int = 24, unicode: bool = True) -> list[Text]:
    """The lines of the view, at most `height` lines of at most `width` cells.

    Args:
        unicode: whether the terminal can show more than ASCII.
    """
    lines = [_progress(snapshot, width, unicode), _loss(snapshot, width, unicode), _speed(snapshot, width)]
    lines += [_health(snapshot), Text()]
    room = max(1, height - len(lines) - 3)
    mesh = list(_mesh(snapshot, width, max(1, min(12, room - 4)), unicode))
    lines += mesh
    events = snapshot.happenings[-max(1, min(8, room - len(mesh))) :]
    if events:
        lines += [Text(), *(_event(happening) for happening in events)]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if unicode else "crop")
    return lines[:height]


def _progress(snapshot: Snapshot, width: int, unicode: bool) -> Text:
    done = snapshot.step / snapshot.last if snapshot.last else 1.0
    head = f"step {snapshot.step}/{snapshot.last} "
    left = snapshot.left_s
    tail = f" {done:4.0%}  " + ("starting" if left is None else f"{duration(left)} left")
    room = max(4, min(60, width - len(head) - len(tail)))
    full = int(done * room)
    bar = ("━", "─") if unicode else ("=", "-")
    return Text.assemble((head, "bold"), (bar[0] * full, "cyan"), (bar[1] * (room - full), "dim"), tail)


def _loss(snapshot: Snapshot, width: int, unicode: bool) -> Text:
    line = snapshot.line
    if not line:
        return Text("loss -", style="dim")
    words = [f"grad norm {line['grad_norm']:.3f}", f"lr {line['lr']:.2e}"]
    if "held_out_loss" in line:
        words.insert(0, f"held-out {line['held_out_loss']:.4f}")
    head, tail = f"loss {line['loss']:.4f} ", "  " + "  ".join(words)
    room = max(0, min(40, width - len(head) - len(tail)))
    return Text.assemble((head, "bold"), (sparkline(snapshot.losses, room, unicode), "magenta"), tail)


def _speed(snapshot: Snapshot, width: int) -> Text:
    if snapshot.step_s is None or snapshot.tokens_per_s is None:
        return Text("waiting for the first step", style="dim")
    words = [f"{quantity(snapshot.tokens_per_s)} tokens/s", f"step {seconds(snapshot.step_s)}"]
    if snapshot.mfu is not None:
        words.insert(1, f"MFU {snapshot.mfu:.1%}")
    memory = snapshot.line.get("memory_bytes")
    text = "  ".join(words)
    shares = [f"{name} {share:.0%}" for name, share in snapshot.shares.items() if share >= 0.005]
    extra = ("  memory " + quantity(memory) + "B") if memory else ""
    split = f" ({', '.join(shares)})" if shares else ""
    while split and cell_len(text + split + extra) > width and len(shares) > 1:
        shares.pop()
        split = f" ({', '.join(shares)})"
    if cell_len(text + split + extra) > width:
        extra = ""
    return Text(text + split + extra)


def _health(snapshot: Snapshot) -> Text:
    words = f"goodput {snapshot.goodput:.1%}  capacity {snapshot.capacity:.1%}"
    words += f" (mean {snapshot.mean_capacity:.1%})  generation {snapshot.generation}"
    if snapshot.recovering_s is None:
        return Text(words)
    return Text.assemble((f"RECOVERING {snapshot.recovering_s:.1f} s", "bold yellow"), "  ", words)


def _mesh(snapshot: Snapshot, width: int, most: int, unicode: bool) -> Iterator[Text]:
    """The map: a cell for every replica, damaged ones first where there is no room for all; the legend."""
    glyphs = _GLYPHS if unicode else _PLAIN
    cells = [_cell(replica, glyphs, len(str(len(snapshot.replicas) - 1))) for replica in snapshot.replicas]
    wide = max(cell.cell_len for cell in cells) + 3
    columns = max(1, width // wide)
    shown = _choose(snapshot.replicas, columns * most)
    for start in range(0, len(shown), columns):
        row = Text()
        for index in shown[start : start + columns]:
            row.append_text(cells[index])
            row.append(" " * (wide - cells[index].cell_len))
        row.rstrip()
        yield row
    yield _legend(snapshot, len(shown), glyphs)


def _choose(replicas: tuple[ReplicaMarks, ...], room: int) -> list[int]:
    if len(replicas) <= room:
        return list(range(len(replicas)))
    whole = [place for place, r in enumerate(replicas) if r.degree == r.base_degree]
    damaged = [place for place, r in enumerate(replicas) if r.degree < r.base_degree]
    return sorted([*damaged, *whole][:room])


def _cell(replica: ReplicaMarks, glyphs: dict[Mark, str], digits: int) -> Text:
    text = Text(f"dp {replica.index:>{digits}} ")
    for mark in replica.marks:
        text.append(glyphs[mark], _STYLES[mark])
    damaged = replica.degree < replica.base_degree
    base = str(replica.base_degree)
    text.append(f" {replica.degree:>{len(base)}}/{base}", "bold yellow" if damaged else "dim")
    return text


def _legend(snapshot: Snapshot, shown: int, glyphs: dict[Mark, str]) -> Text:
    text = Text()
    counts = dict.fromkeys(Mark, 0)
    for marks in (*(replica.marks for replica in snapshot.replicas), snapshot.standbys):
        for mark in marks:
            counts[mark] += 1
    for mark, count in counts.items():
        if count:
            text.append(glyphs[mark], _STYLES[mark]).append(f" {count} {mark.value}  ", "dim")
    hidden = len(snapshot.replicas) - shown
    if hidden:
        text.append(f"({hidden} more replicas)", "dim")
    return text


def _event(happening: Happening) -> Text:
    when = strftime("%H:%M:%S", localtime(happening.time))
    style = _KINDS.get(happening.kind, "")
    if happening.kind == "end":
        style = "bold red" if happening.values.get("code") else "green"
    return Text.assemble((f"{when} ", "dim"), (f"{happening.kind:<8} ", style), happening.text)


def sparkline(values: tuple[float, ...], room: int, unicode: bool = True) -> str:
    """At most `room` bars from the lowest to the highest value; each the mean of as many neighbours."""
    finite = [value for value in values if value - value == 0]
    if len(finite) < 2 or room < 2:
        return ""
    per_bar = -(-len(finite) // room)
    means = [sum(part) / len(part) for part in _batches(finite, per_bar)]
    bars, low, high = _BARS if unicode else _PLAIN_BARS, min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def _batches(values: list[float], size: int) -> Iterator[list[float]]:
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part


def duration(left_s: float) -> str:
    """`3d 4h`, `3h 12m`, `4m 10s` or `9s`."""
    whole = int(left_s)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def seconds(value: float) -> str:
    """`12.3 ms` or `1.23 s`."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def quantity(value: float) -> str:
    """Three digits and a letter: `1.23M`."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"
