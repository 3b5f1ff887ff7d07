"""Wrong invocations of the commands around `ntp-launch`: one line with the facts, code 2, no traceback."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

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


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m ntp_launcher.completion_cli bash | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
