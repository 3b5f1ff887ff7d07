"""The files of a run, of which every value that a command goes by has the type that a run writes.

`ntp.run_directory` knows which keys a line has; here are the types, so that nothing below asks again. What
stands in a file and is not looked at may be anything: a later version may write more.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ntp.run_directory import RunError, read_objects
from ntp.run_directory import read_steps as read_step_lines
from ntp.run_directory import read_summary as read_summary_object

Line = Mapping[str, Any]
_Whole = Annotated[int, Field(ge=0, lt=1 << 53)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, lt=1e11)]  # which a calendar has


class _Values(BaseModel):
    model_config = ConfigDict(strict=True)


class _Step(_Values):
    step: _Whole
    loss: float
    loss_bits: str
    tokens_per_s: float | None
    generation: _Whole
    memory_bytes: float = 0.0
    phases_s: dict[str, _Finite] = {}
    time: _Time = 0.0


class _Event(_Values):
    time: _Time
    kind: str
    text: str


class _Membership(_Event):
    generation: _Whole
    failed: list[_Whole]


class _Change(_Values):
    generation: _Whole
    detect: _Finite = 0.0
    agree: _Finite = 0.0
    unblock: _Finite = 0.0
    rebuild: _Finite = 0.0
    move: _Finite = 0.0
    replay: _Finite = 0.0


class _Recovery(_Event, _Change):
    pass


class _Saves(_Values):
    saves: _Whole = 0
    save_gbytes_s: float = 0.0
    longest_stall_s: float = 0.0


class _Summary(_Values):
    generations: _Whole = 0
    goodput: float = 0.0
    wall_s: _Finite = 0.0
    checkpoints: _Saves = _Saves()
    recoveries: list[_Change] = []


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none where the file is missing. Raises RunError for a damaged one."""
    lines = read_step_lines(run_dir)
    for number, line in enumerate(lines, start=1):
        _check(_Step, line, run_dir / "metrics.jsonl", f"line {number}: ")
    return lines


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`; none where the file is missing. Raises RunError for a damaged one."""
    path = run_dir / "events.jsonl"
    lines = read_objects(path, ("time", "kind", "text"))
    for number, line in enumerate(lines, start=1):
        _check(_kind_of(line), line, path, f"line {number}: ")
    return lines


def read_summary(run_dir: Path) -> dict[str, Any]:
    """`summary.json`; {} where the run has not ended well. Raises RunError for a damaged one."""
    values = read_summary_object(run_dir)
    _check(_Summary, values, run_dir / "summary.json", "")
    return values


def _kind_of(event: Line) -> type[_Values]:
    if "failed" in event or event["kind"] == "loss":
        return _Membership
    return _Recovery if event["kind"] == "recovery" else _Event


def _check(values: type[_Values], line: Line, path: Path, place: str) -> None:
    try:
        values.model_validate(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        wanted = first["msg"].replace("Input should be", "expected")
        found = "" if first["type"] == "missing" else f", found {json.dumps(first['input'])[:60]}"
        raise RunError(f"{str(path)!r} is not what a run writes: {place}{key}: {wanted}{found}") from None
