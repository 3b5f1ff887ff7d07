"""Ctrl-C before a command has begun and after it has ended."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ntp_launcher import commands

ROOT = Path(__file__).parent.parent
WHILE_IT_LOADS = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "ntp_launcher.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
WHEN_IT_HAS_ENDED = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""
IGNORED = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""
LAUNCH = """
import sys
from ntp_launcher.commands import launch
sys.argv = ["ntp-launch", "--help"]
sys.exit(launch())
"""


def launch(before):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", before + LAUNCH]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("moment", [WHILE_IT_LOADS, WHEN_IT_HAS_ENDED], ids=["loading", "ended"])
def test_ctrl_c_ends_a_command_in_silence(moment):
    done = launch(moment)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


@pytest.mark.parametrize("moment", [WHILE_IT_LOADS, WHEN_IT_HAS_ENDED], ids=["loading", "ended"])
def test_a_command_in_the_background_ignores_it_as_its_shell_wants(moment):
    done = launch(IGNORED + moment)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_installed_command_begins_there():
    text = (ROOT / "pyproject.toml").read_text()
    scripts = dict(re.findall(r'^(ntp-\w+) = "ntp_launcher\.commands:(\w+)"$', text, re.MULTILINE))
    assert len(scripts) == len(re.findall(r"^ntp-\w+ = ", text, re.MULTILINE)) == 9
    assert all(callable(getattr(commands, name)) for name in scripts.values())
