"""When each GPU is down: drawn from rates or read from a trace, then counted per tensor-parallel group.

An *outage* is a half-open interval of one GPU. A GPU that is hit while it is down stays down until the last
repair; it never counts twice. A *slot* is a tensor-parallel group of tp neighbours in one domain.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntp.planner.study import FailureKind, Failures, StudyError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = NDArray[np.int16]

_HEADER = ["time", "domain", "gpu", "event"]


@dataclass(frozen=True, slots=True)
class Outages:
    """Intervals `[start, stop)` in hours, sorted by GPU then time; those of one GPU do not touch."""

    gpu: Ints
    start: Floats
    stop: Floats


def merge(gpu: Ints, start: Floats, stop: Floats, horizon: float) -> Outages:
    """Unite overlapping intervals of a GPU and cut all of them to `[0, horizon)`."""
    start, stop = np.clip(start, 0, horizon), np.clip(stop, 0, horizon)
    kept = stop > start
    gpu, start, stop = gpu[kept], start[kept], stop[kept]
    order = np.lexsort((start, gpu))
    gpu, start, stop = gpu[order], start[order], stop[order]
    if not len(gpu):
        return Outages(gpu, start, stop)
    shift = gpu * (2 * horizon + 1)  # puts the GPUs one after another on one axis
    reach = np.maximum.accumulate(stop + shift)
    first = np.append(True, start[1:] + shift[1:] > reach[:-1])
    last = np.append(first[1:], True)
    return Outages(gpu[first], start[first], np.minimum(reach[last] - shift[last], horizon))


def draw(failures: Failures, gpus: int, horizon: float, random: np.random.Generator) -> Outages:
    """Outages of `gpus` GPUs over `horizon` hours: a Poisson process for each kind of failure."""
    parts = [_draw_kind(kind, failures.start, gpus, horizon, random) for kind in failures.kinds]
    gpu = np.concatenate([part[0] for part in parts])
    start = np.concatenate([part[1] for part in parts])
    stop = np.concatenate([part[2] for part in parts])
    return merge(gpu, start, stop, horizon)


def _draw_kind(
    kind: FailureKind, beginning: str, gpus: int, horizon: float, random: np.random.Generator
) -> tuple[Ints, Floats, Floats]:
    before = max(kind.repair_hours) if beginning == "steady" else 0.0
    count = random.poisson(kind.per_gpu_hour * gpus * (horizon + before))
    start = random.uniform(-before, horizon, count)
    stop = start + random.choice(np.array(kind.repair_hours), count)
    return _widen(random.integers(gpus, size=count), kind.blast_radius, start, stop)


def _widen(gpu: Ints, radius: int, start: Floats, stop: Floats) -> tuple[Ints, Floats, Floats]:
    """Every failure hits the aligned block of `radius` GPUs around its origin."""
    hit = (gpu // radius * radius)[:, None] + np.arange(radius)
    return hit.ravel(), np.repeat(start, radius), np.repeat(stop, radius)


def read_trace(path: str | Path, domains: int, domain_size: int, horizon: float) -> Outages:
    """Outages in a CSV file with the header `time,domain,gpu,event`.

    Times are hours from the start and do not go back; `gpu` counts inside its domain; `event` is `fail` or
    `repair`. What fails and is not repaired stays down; what happens after `horizon` is left out. Raises
    StudyError with line and value.
    """
    down: dict[int, float] = {}
    found: list[tuple[int, float, float]] = []
    for number, gpu, time, fails in _events(path, domains, domain_size):
        if fails == (gpu in down):
            state = "failed already" if fails else "is not failed"
            place = f"domain {gpu // domain_size} gpu {gpu % domain_size}"
            raise StudyError(f"{path}, line {number}: {place} {state} at time {time:g}")
        if fails:
            down[gpu] = time
        else:
            found.append((gpu, down.pop(gpu), time))
    found += [(gpu, time, math.inf) for gpu, time in down.items()]
    table = np.array(found, dtype=np.float64).reshape(-1, 3)
    return merge(table[:, 0].astype(np.int64), table[:, 1], table[:, 2], horizon)


def _events(path: str | Path, domains: int, domain_size: int) -> Iterator[tuple[int, int, float, bool]]:
    """Line number, GPU, time and whether it fails, for each line of a trace."""
    latest = 0.0
    for number, row in read_rows(path, _HEADER):
        time = number_in(path, number, "time", row[0])
        if time < latest:
            raise StudyError(f"{path}, line {number}: time {row[0]} is before {latest:g} of an earlier line")
        latest = time
        domain = _index_in(path, number, "domain", row[1], domains)
        gpu = _index_in(path, number, "gpu", row[2], domain_size)
        if row[3] not in ("fail", "repair"):
            raise StudyError(f"{path}, line {number}: event {row[3]!r} is neither fail nor repair")
        yield number, domain * domain_size + gpu, time, row[3] == "fail"


def read_rows(path: str | Path, header: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and stripped cells of each data line of a CSV file that starts with `header`.

    Raises StudyError for a file that cannot be read, another header or a line of another length.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            first = [cell.strip() for cell in next(reader, list[str]())]
            if first != header:
                raise StudyError(f"{path}, line 1: expected the header {','.join(header)}, found {first}")
            for row in reader:
                if row:
                    if len(row) != len(header):
                        raise StudyError(
                            f"{path}, line {reader.line_num}: expected {len(header)} values, found {row}"
                        )
                    yield reader.line_num, [cell.strip() for cell in row]
    except OSError as error:
        raise StudyError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise StudyError(f"{path} is not a CSV file in UTF-8: {error}") from None


def number_in(path: str | Path, line: int, name: str, text: str) -> float:
    """A finite number of 0 or more. Raises StudyError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise StudyError(f"{path}, line {line}: {name} {text!r} is not a number of 0 or more")
    return value


def _index_in(path: str | Path, line: int, name: str, text: str, limit: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise StudyError(f"{path}, line {line}: {name} {text!r} is not a whole number")
    if int(text) >= limit:
        raise StudyError(f"{path}, line {line}: {name} {text} is out of range, there are {limit}")
    return int(text)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Failed GPUs per slot, constant between change points.

    Attributes:
        time: start of each interval in hours; the first is 0.
        hours: its length.
    """

    time: Floats
    hours: Floats
    _row: Ints
    _slot: Ints
    _change: Counts
    slots: int

    def changes(self, slots: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether a GPU of the first `slots` slots fails, and whether one is repaired, at each start."""
        rows, change = self._row[self._slot < slots], self._change[self._slot < slots]
        size = len(self.time)
        return np.bincount(rows[change > 0], minlength=size) > 0, np.bincount(
            rows[change < 0], minlength=size
        ) > 0

    def chunks(self, elements: int = 1 << 22) -> Iterator[tuple[slice, Counts]]:
        """Rows of intervals and their failed GPUs `[rows, slots]`, a limited number of elements at a time."""
        rows = max(1, elements // self.slots)
        carried = np.zeros(self.slots, np.int16)
        for begin in range(0, len(self.time), rows):
            end = min(begin + rows, len(self.time))
            failed = np.zeros((end - begin, self.slots), np.int16)
            mine = slice(*np.searchsorted(self._row, (begin, end)))
            np.add.at(failed, (self._row[mine] - begin, self._slot[mine]), self._change[mine])
            failed[0] += carried
            np.cumsum(failed, axis=0, dtype=np.int16, out=failed)
            carried = failed[-1].copy()
            yield slice(begin, end), failed


def timeline(outages: Outages, slots: int, tp: int, horizon: float) -> Timeline:
    """Count the failed GPUs of `slots` groups of `tp` GPUs; outages of other GPUs are left out."""
    kept = outages.gpu < slots * tp
    slot = outages.gpu[kept] // tp
    at = np.concatenate([outages.start[kept], outages.stop[kept]])
    change = np.repeat(np.array([1, -1], np.int16), len(slot))
    inside = at < horizon
    at, change, slot = at[inside], change[inside], np.tile(slot, 2)[inside]
    time, row = np.unique(np.append(0.0, at), return_inverse=True)
    row = row[1:]
    order = np.argsort(row, kind="stable")
    return Timeline(
        time=time,
        hours=np.diff(np.append(time, horizon)),
        _row=row[order],
        _slot=slot[order],
        _change=change[order],
        slots=slots,
    )


def scattered(count: int, gpus: int, radius: int, random: np.random.Generator) -> Ints:
    """About `count` failed GPUs: whole aligned blocks of `radius`, chosen at random."""
    blocks = random.choice(gpus // radius, round(count / radius), replace=False)
    return (blocks[:, None] * radius + np.arange(radius)).ravel()
