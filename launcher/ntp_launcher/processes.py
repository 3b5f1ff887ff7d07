"""Worker processes of one node: start, look, stop. The only place that forks and kills.

Every worker is its own session and process group, so that a terminal's Ctrl-C reaches the launcher alone, and
whatever a worker has started ends with it. A worker cannot outlive the launcher (see `child`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ntp_launcher import child
from ntp_launcher.outcome import last_error_line
from ntp_launcher.signals import is_hurried

_TAIL_BYTES = 1 << 16
_POLL_S = 0.02
_KILL_S = 5.0  # a killed process is gone within milliseconds, or not at all


@dataclass(frozen=True)
class WorkerProcess:
    """A started worker and where its output goes."""

    rank: int
    popen: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    def poll(self) -> int | None:
        """None while it runs, else its exit code (negative: the signal that killed it).

        What it has left behind in its process group is killed before the process is reaped, while its id
        cannot yet belong to anyone else.
        """
        if self.popen.returncode is None:
            if _is_running(self.popen):
                return None
            self.send(signal.SIGKILL)
        return self.popen.wait()

    def send(self, signal_number: int) -> None:
        """Sends a signal to the worker and what it has started; only for one that has not been reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal_number)

    def error(self) -> str:
        """The last error line of its stderr, "" when there is none."""
        with self.stderr.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return last_error_line(file.read().decode(errors="replace").splitlines())


def start_worker(rank: int, module: str, environ: Mapping[str, str], log_dir: Path) -> WorkerProcess:
    """Starts `python -m module rankN` with exactly this environment; its output goes to files in `log_dir`.

    The argument is for people who look for a rank among the processes.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    stdout, stderr = log_dir / "stdout.log", log_dir / "stderr.log"
    shim = [sys.executable, "-I", "-S", str(Path(child.__file__)), str(os.getpid())]
    with stdout.open("wb") as out, stderr.open("wb") as err:
        popen = subprocess.Popen(
            [*shim, sys.executable, "-m", module, f"rank{rank}"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            start_new_session=True,
        )
    return WorkerProcess(rank, popen, stdout, stderr)


def stop_workers(workers: Iterable[WorkerProcess], signal_number: int, grace_s: float) -> None:
    """Ends workers: the signal, `grace_s` seconds to obey it, then SIGKILL. Returns when they are gone.

    A second signal to the launcher is the end of their grace.
    """
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.send(signal_number)
    deadline = time.monotonic() + grace_s
    while any(worker.poll() is None for worker in running) and time.monotonic() < deadline:
        if is_hurried():
            break
        time.sleep(_POLL_S)
    for worker in running:
        if worker.poll() is None:
            worker.send(signal.SIGKILL)
    for worker in running:
        with contextlib.suppress(subprocess.TimeoutExpired):  # not even SIGKILL ends a wait inside a driver
            worker.popen.wait(timeout=_KILL_S)


def _is_running(popen: "subprocess.Popen[bytes]") -> bool:
    """Looks without reaping where the system can."""
    if not hasattr(os, "waitid"):
        return popen.poll() is None
    return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
