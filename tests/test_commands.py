"""Wrong invocations of the commands around `ntp-launch`: one line with the facts, code 2, no traceback."""

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
    ("completion", ["csh"], ["csh", "bash", "zsh", "fish"]),
    ("doctor", ["here"], ["here"]),
]


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
