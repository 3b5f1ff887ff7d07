"""The README's commands run as they stand, with fewer steps of a smaller model."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL) for kind in ("sh", "python")}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
COMMANDS = [line for block in BLOCKS["sh"] for line in block.splitlines()]
SMALLER = [
    *("--set", "train.steps=10"),
    *("--set", "model.num_hidden_layers=1"),
    *("--set", "train.seq_len=32"),
    *("--set", "train.global_batch=4"),
]  # what the test adds to every launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with the configs."""
    place = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "configs", place / "configs")
    shutil.copy(ROOT / "README.md", place)
    return place


def run(words, folder):
    """Run a console script or a program; returns its output."""
    if words[0] in SCRIPTS:
        module, _, function = SCRIPTS[words[0]].partition(":")
        call = f"import sys; from {module} import {function}; sys.exit({function}(sys.argv[1:]))"
        words = [sys.executable, "-c", call, *words[1:]]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1800)
def test_every_command_runs_in_order_and_the_runs_are_equal(folder):
    """The two install lines are `.ci/run`'s; of the first, the command after the installation runs here."""
    for line in COMMANDS:
        install, _, command = line.rpartition(" && ")
        words = shlex.split(command)
        if words[0] == "pytest":
            assert install.startswith("pip install torch==")
        elif words[0] == "ntp-launch":
            run([*words, *SMALLER], folder)
        else:
            assert words[0] in SCRIPTS, line
            run(words, folder)


def test_every_python_block_runs(folder):
    for block in BLOCKS["python"]:
        assert run([sys.executable, "-c", block], folder).startswith("{0: ")


def test_the_gate_finds_the_test_command():
    assert [line for line in COMMANDS if "[test]" in line] == [
        "pip install torch==2.13.0 -e '.[test]' && pytest"
    ]
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_readme_is_short_and_names_every_command():
    assert len(README.splitlines()) <= 200
    assert [name for name in SCRIPTS if f"`{name}" not in README] == []
