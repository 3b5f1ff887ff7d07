"""Shells complete every command: its options, its files, the words of a choice."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from ntp_launcher import completion_cli

ROOT = Path(__file__).parent.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
COMPLETE = """
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE="{words}" COMP_POINT=${{#COMP_LINE}}
_shtab_{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert completion_cli.main([shell]) == 0
    return capsys.readouterr().out


def bash(text: str, words: str, folder: Path) -> list[str]:
    """What bash proposes for the last of the words."""
    function = words.split()[0].replace("-", "_")
    call = COMPLETE.format(words=words, last=len(words.split()) - 1, function=function)
    done = subprocess.run(
        ["bash", "-c", text + call], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_every_console_script_is_completed() -> None:
    assert {parser.prog for parser in completion_cli.parsers()} == set(SCRIPTS)


@pytest.mark.parametrize("shell", completion_cli.SHELLS)
def test_every_option_is_known_to_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for parser in completion_cli.parsers():
        for option in parser._option_string_actions:
            name = option.lstrip("-")  # fish writes "-l dry-run"
            assert "_" in name or name in text, (parser.prog, option)


def test_bash_proposes_options_files_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    (tmp_path / "job.yaml").touch()
    (tmp_path / "folder").mkdir()
    assert bash(text, "ntp-launch --dry", tmp_path) == ["--dry-run"]
    assert bash(text, "ntp-launch jo", tmp_path) == ["job.yaml"]
    assert bash(text, "ntp-launch --log-format j", tmp_path) == ["json"]
    assert bash(text, "ntp-report f", tmp_path) == ["folder"]
    assert bash(text, "ntp-plan sim", tmp_path) == ["simulate"]
    assert bash(text, "ntp-plan advise --ran", tmp_path) == ["--rank-map"]


@pytest.mark.parametrize("shell", completion_cli.SHELLS)
def test_the_script_is_of_its_shells_language(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell, capsys))
    done = subprocess.run([shell, "-n", "script"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_proposes_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "script").write_text(script("fish", capsys))
    ask = "source script; complete -C 'ntp-launch --dry'"
    done = subprocess.run(["fish", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith("--dry-run\t")
