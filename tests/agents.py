"""Agents of two nodes on this host, as processes of their own; what they say goes to a file each."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.test_launcher_agent import free_port


class Agents:
    """Starts agents and ends them.

    Args:
        directory: for what they say.
        options: of `ntp-launch`, the same for all; the run directory is ours.
        module: what a worker runs.
        environ: added to their environment.
    """

    def __init__(self, directory: Path, options: Sequence[str], module: str = "ntp.worker", **environ: str):
        self._directory, self.run_dir = directory, directory / "run"
        where = ["--run-dir", str(self.run_dir), "--rdzv-endpoint", f"localhost:{free_port()}"]
        self._options = [*options, *where, "--nnodes", "2"]
        self._main = (
            f"import sys; from ntp_launcher.cli import main; sys.exit(main(worker_module='{module}'))"
        )
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, *options: str) -> "subprocess.Popen[bytes]":
        """One more agent."""
        command = [sys.executable, "-c", self._main, *self._options, "--node-rank", str(node), *options]
        with self._file(len(self._started)).open("wb") as file:
            process = subprocess.Popen(command, env=self._environ, stdout=subprocess.DEVNULL, stderr=file)
        self._started.append(process)
        return process

    def said(self, agent: int) -> str:
        """What an agent has written, by order of start."""
        return self._file(agent).read_text()

    def close(self) -> None:
        """Kills those that are left."""
        for process in self._started:
            process.kill()
            process.wait()

    def _file(self, agent: int) -> Path:
        return self._directory / f"agent{agent}"
