"""Worker processes of one node: start, look, stop. The only place that kills them.

Every worker is its own session and process group, so that a terminal's Ctrl-C reaches the launcher alone, and
whatever a worker has started ends with it. A worker cannot outlive the launcher (see `child`). It is started
anew, or forked from a process that has imported all that it needs (see `fork_server`).
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ntp_launcher import child
from ntp_launcher.fork_server import ForkServer
from ntp_launcher.outcome import last_error_line

_TAIL_BYTES = 1 << 16
_POLL_S = 0.02
_KILL_S = 5.0  # a killed process is gone within milliseconds, or not at all


class Forked:
    """A child that the fork server has made, with what of `subprocess.Popen` is needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Reap it. Raises subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            else:
                time.sleep(_POLL_S)
        return self.returncode


@dataclass(frozen=True)
class WorkerProcess:
    """A started worker and where its output goes."""

    rank: int
    popen: subprocess.Popen[bytes] | Forked
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


def start_worker(
    rank: int, module: str, environ: Mapping[str, str], log_dir: Path, server: ForkServer | None = None
) -> WorkerProcess:
    """Starts `python -m module rankN` with exactly this environment; its output goes to files in `log_dir`.

    The argument is for people who look for a rank among the processes. With a server, it forks the worker.
    Raises OSError.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    stdout, stderr = log_dir / "stdout.log", log_dir / "stderr.log"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        if server is not None:
            process = Forked(server.fork(rank, environ, out, err))
        else:
            process = _new_process(rank, module, environ, out, err)
    return WorkerProcess(rank, process, stdout, stderr)


def _new_process(
    rank: int, module: str, environ: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> "subprocess.Popen[bytes]":
    shim = [sys.executable, "-I", "-S", str(Path(child.__file__)), str(os.getpid())]
    return subprocess.Popen(
        [*shim, sys.executable, "-m", module, f"rank{rank}"],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environ),
        start_new_session=True,
    )


def stop_workers(workers: Iterable[WorkerProcess], signal_number: int, grace_s: float) -> None:
    """Ends workers: the signal, `grace_s` seconds to obey it, then SIGKILL. Returns when they are gone."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.send(signal_number)
    deadline = time.monotonic() + grace_s
    while any(worker.poll() is None for worker in running) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for worker in running:
        if worker.poll() is None:
            worker.send(signal.SIGKILL)
    for worker in running:
        with contextlib.suppress(subprocess.TimeoutExpired):  # not even SIGKILL ends a wait inside a driver
            worker.popen.wait(timeout=_KILL_S)


def reap_orphans(groups: set[int]) -> None:
    """Reaps what ended workers have left in their process groups, and forgets those that are empty."""
    for group in list(groups):
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            groups.remove(group)


def _is_running(popen: "subprocess.Popen[bytes] | Forked") -> bool:
    """Looks without reaping where the system can."""
    if isinstance(popen, subprocess.Popen) and not hasattr(os, "waitid"):
        return popen.poll() is None
    return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
