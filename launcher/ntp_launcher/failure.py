"""What is said of a failed job above its last line: whose end came first, the end of that rank's log, where
the rest is, and, folded into one line, whose ends were consequences."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ntp_launcher.events import End

_LINES = 12
_WIDTH = 160
_TAIL_BYTES = 1 << 14


def failure_report(end: End, log_dir: Path) -> str:
    """Lines for stderr, each with its end; "" where no log says more than the reason."""
    if end.rank is None:
        return ""
    return "".join(f"{line}\n" for line in _lines(end, log_dir))


def _lines(end: End, log_dir: Path) -> Iterator[str]:
    assert end.rank is not None
    yield f"first cause: rank {end.rank}" + f" on host {end.host}" * bool(end.host)
    log = newest_log(log_dir, end.rank)
    if log is None:
        yield f"  its log is not here but on that host, under {log_dir}"
    else:
        for line in tail(log):
            yield f"  | {line}"
        yield f"  the rest is in {log}"
    if end.others:
        yield f"  {len(end.others)} more ended because of it: {_names(end.others)}"


def newest_log(log_dir: Path, rank: int) -> Path | None:
    """stderr of the rank's newest process, of stdout where stderr is empty; None where there is none."""
    found = [path for path in log_dir.glob(f"rank{rank}*/stderr.log") if _incarnation(path, rank) >= 0]
    if not found:
        return None
    newest = max(found, key=lambda path: _incarnation(path, rank))
    stdout = newest.with_name("stdout.log")
    return stdout if not newest.stat().st_size and stdout.exists() else newest


def tail(log: Path, most: int = _LINES) -> list[str]:
    """The last lines that say something, cut to a readable width."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..." for line in lines[-most:]]


def _incarnation(path: Path, rank: int) -> int:
    """`rank3` is 0, `rank3.2` is 2; -1 for another rank's."""
    name, _, number = path.parent.name.partition(".")
    return int(number or 0) if name == f"rank{rank}" else -1


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
