"""Wrong invocations of the commands around `ntp-launch`: one line with the facts, code 2, no traceback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO

import pytest
from ntp_launcher.ending import ending

from tests.test_launcher_agent import TINY
from tests.test_report import run

WRONG: list[tuple[str, list[str], list[str]]] = [
    ("compare", [], ["RUN_DIR"]),
    ("compare", ["good", "nowhere"], ["'nowhere'", "not a run directory"]),
    ("compare", ["good", "file"], ["'file'", "not a run directory"]),
    ("compare", [".", "good"], ["'.'", "not a run directory", "good"]),
    ("compare", ["good", "binary"], ["binary/metrics.jsonl", "UTF-8"]),
    ("compare", ["good", "lacking"], ["lacking/metrics.jsonl", "line 1", "loss_bits"]),
    ("compare", ["good", "good"], ["'good'", "no summary.json"]),
    ("report", ["."], ["'.'", "not a run directory", "good"]),
    ("report", ["binary"], ["binary/metrics.jsonl", "UTF-8"]),
    ("report", ["lacking"], ["lacking/metrics.jsonl", "line 1", "loss_bits"]),
    ("report", ["good", "-o", "nowhere/page.html"], ["nowhere/page.html", "No such file"]),
    ("export", ["good"], ["OUT"]),
    ("export", [".", "out"], ["'.'", "not a run directory", "good"]),
    ("export", ["good", "out"], ["no checkpoint", "checkpoint.every"]),
    ("export", ["good", "out", "--step", "-1"], ["--step", "'-1'", "0 or more"]),
    ("heal", [".", "--ranks", "3"], ["'.'", "not a run directory", "good"]),
    ("heal", ["good", "--ranks", "9"], ["rank '9'", "0 to 7"]),
    ("store", ["--port", "99999"], ["--port", "'99999'", "65535"]),
    ("store", ["--port", "-1"], ["--port", "'-1'", "65535"]),
    ("plan", ["advise", TINY, "--domain-size", "0"], ["--domain-size", "'0'", "1 or more"]),
    ("plan", ["simulate", TINY], ["unknown key"]),
    ("plan", ["advise", TINY, "--failed", "9"], ["rank '9'", "0 to 7"]),
    ("compare", ["good", ""], ["RUN_DIR", "expected a path, found ''"]),
    ("report", [""], ["RUN_DIR", "expected a path, found ''"]),
    ("report", ["good", "-o", ""], ["-o", "expected a path, found ''"]),
    ("export", ["", "out"], ["RUN_DIR", "expected a path, found ''"]),
    ("export", ["good", ""], ["OUT", "expected a path, found ''"]),
    ("heal", ["", "--ranks", "3"], ["RUN_DIR", "expected a path, found ''"]),
    ("doctor", ["--run-dir", ""], ["--run-dir", "expected a path, found ''"]),
    ("plan", ["simulate", ""], ["CLUSTER.yaml", "expected a path, found ''"]),
    ("plan", ["advise", ""], ["CONFIG.yaml", "expected a path, found ''"]),
    ("plan", ["advise", TINY, "--rank-map", ""], ["--rank-map", "expected a path, found ''"]),
    ("completion", ["csh"], ["csh", "bash", "zsh", "fish"]),
    ("doctor", ["here"], ["here"]),
]


DAMAGED: list[tuple[str, str | dict[str, object], list[str]]] = [
    ("summary.json", "[]", ["no JSON object"]),
    ("summary.json", "3", ["no JSON object"]),
    ("summary.json", "{}", ["no JSON object with steps"]),
    ("summary.json", '{"steps"', ["not JSON"]),
    ("summary.json", '{"steps": 1, "goodput": "good"}', ["goodput", '"good"']),
    ("summary.json", '{"steps": 1, "wall_s": Infinity}', ["wall_s", "Infinity"]),
    ("summary.json", '{"steps": 1, "recoveries": {"a": 1}}', ["recoveries"]),
    ("summary.json", '{"steps": 1, "recoveries": [{"unblock": 1}]}', ["recoveries.0.generation"]),
    ("summary.json", '{"steps": 1, "checkpoints": {"saves": "two"}}', ["checkpoints.saves", '"two"']),
    ("metrics.jsonl", {"step": "x"}, ["line 10", "step", '"x"']),
    ("metrics.jsonl", {"step": [1]}, ["line 10", "step", "[1]"]),
    ("metrics.jsonl", {"loss": None}, ["line 10", "loss", "null"]),
    ("metrics.jsonl", {"loss_bits": []}, ["line 10", "loss_bits"]),
    ("metrics.jsonl", {"tokens_per_s": "fast"}, ["line 10", "tokens_per_s"]),
    ("metrics.jsonl", {"generation": None}, ["line 10", "generation"]),
    ("metrics.jsonl", {"memory_bytes": 10**400}, ["line 10", "memory_bytes"]),
    ("metrics.jsonl", {"phases_s": None}, ["line 10", "phases_s"]),
    ("metrics.jsonl", {"phases_s": {"compute": "long"}}, ["line 10", "phases_s.compute"]),
    ("metrics.jsonl", {"time": "now"}, ["line 10", "time"]),
    ("events.jsonl", {"time": 1e300}, ["line 2", "time", "1e+300"]),
    ("events.jsonl", {"kind": 3}, ["line 2", "kind", "3"]),
    ("events.jsonl", {"text": None}, ["line 2", "text", "null"]),
    ("events.jsonl", {"failed": 3}, ["line 2", "failed", "3"]),
    ("events.jsonl", {"failed": ["a"]}, ["line 2", "failed.0", '"a"']),
    ("events.jsonl", {"generation": "first"}, ["line 2", "generation"]),
    ("events.jsonl", {"kind": "recovery", "unblock": "quick"}, ["line 2", "unblock"]),
]


def damage(path: Path, change: str | dict[str, object]) -> None:
    """Replaces a file, or values in its last line."""
    if isinstance(change, str):
        path.write_text(change)
        return
    *before, last = path.read_text().splitlines(keepends=True)
    line = json.loads(last) | change
    if line.get("kind") == "recovery":
        del line["failed"]
    path.write_text("".join(before) + json.dumps(line) + "\n")


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize(("name", "change", "facts"), DAMAGED)
def test_a_value_that_no_run_writes_is_told_in_one_line(
    command: str,
    name: str,
    change: str | dict[str, object],
    facts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = run(tmp_path / "one", loss=True)
    (tmp_path / "one" / "summary.json").write_text('{"steps": 10}')
    damage(tmp_path / "one" / name, change)
    code = import_module(f"ntp_launcher.{command}_cli").main([one, one])
    if command == "compare" and name == "events.jsonl":  # which it does not read
        assert code == 0
        return
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert all(fact in line for fact in [repr(str(tmp_path / "one" / name)), *facts]), line


@pytest.mark.parametrize(
    ("command", "arguments", "facts"), WRONG, ids=[" ".join([name, *words]) for name, words, _ in WRONG]
)
def test_a_wrong_invocation_is_told_in_one_line_with_its_facts(
    command: str,
    arguments: list[str],
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "binary", "lacking"):
        run(tmp_path / name, loss=False)
    (tmp_path / "binary" / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    (tmp_path / "lacking" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "file").touch()
    try:
        code = import_module(f"ntp_launcher.{command}_cli").main(arguments)
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith(f"ntp-{command}")
    assert all(fact in line for fact in facts), line


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert ending("ntp-heal", interrupted) == 130
    assert capsys.readouterr().err == ""


TELLS_MUCH = [
    "ntp_launcher.completion_cli bash",
    "ntp_launcher.plan_cli --help",
    f"ntp_launcher.plan_cli predict {TINY}",
    f"ntp_launcher {TINY} --dry-run",
]


@contextmanager
def no_reader() -> Iterator[int]:
    """The descriptor of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def python(command: str, stdout: int | IO[str], stderr: int | IO[str]) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(words, stdout=stdout, stderr=stderr, text=True, env=environ, check=False)


@pytest.mark.parametrize("command", TELLS_MUCH)
def test_a_reader_that_leaves_ends_a_command_without_a_word(command: str) -> None:
    with no_reader() as pipe:
        done = python(command, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", TELLS_MUCH)
def test_output_that_finds_no_room_is_told_in_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = python(command, stdout=full, stderr=subprocess.PIPE)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.endswith("cannot write to stdout: No space left on device")


def test_a_complaint_that_nobody_hears_keeps_its_code() -> None:
    with no_reader() as pipe:
        assert python("ntp_launcher.plan_cli advise nowhere.yaml", stdout=pipe, stderr=pipe).returncode == 2
