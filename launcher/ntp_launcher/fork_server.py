"""One process of a node imports what workers need, and forks them: one import a node, not one a worker.

A forked worker is a child of the launcher, as one that the launcher starts itself: its exit code is the
launcher's to read, and it outlives the server. For that the launcher takes in orphans
(PR_SET_CHILD_SUBREAPER), and the server forks twice and lets the process in the middle end. Linux only.

A request is a byte that brings the files of the output, then a line of JSON. The answer is the worker's
process id, which it sends itself once it is the launcher's child and leads a session of its own.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ntp_launcher import child

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FIRST_S, _LATER_S = 120.0, 10.0  # for an answer; imports, from a slow file system perhaps, are in the first
_POLL_S = 0.0005
_LOCALE = ("LC_CTYPE",)  # Python itself sets it where there is none
_ROOM = "." * 160  # for the command line that a worker shows


class ForkServer:
    """The launcher's side. `module` is imported by the server, and its `main` is what a worker runs.

    Args:
        environ: of the server, and so of whatever is read at import: the environment of any worker.
        log: receives what the server itself has to say.
    """

    def __init__(self, module: str, environ: Mapping[str, str], log: Path) -> None:
        _control_process(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = socket.socketpair()
        me = str(os.getpid())
        shim = [sys.executable, "-I", "-S", str(Path(child.__file__)), me]
        server = [sys.executable, "-m", "ntp_launcher.fork_server", str(theirs.fileno()), me, module, _ROOM]
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("wb") as out:
            self._process = subprocess.Popen(
                [*shim, *server],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        ours.settimeout(_FIRST_S)

    def fork(self, rank: int, environ: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]) -> int:
        """Start a worker with exactly this environment; its process id.

        Raises:
            ConnectionResetError: the server has ended; its log says why.
            OSError: it does not answer, or cannot be reached.
        """
        request = json.dumps({"rank": rank, "environ": dict(environ)})
        socket.send_fds(self._connection, [b"\n"], [stdout.fileno(), stderr.fileno()])
        self._connection.sendall(request.encode() + b"\n")
        answer = self._connection.recv(32)
        if not answer:
            raise ConnectionResetError("the fork server has ended")
        self._connection.settimeout(_LATER_S)
        return int(answer)

    def close(self) -> None:
        """End the server, and no worker."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Serve until the launcher closes the connection; a worker leaves this function as what it is."""
    _, handle, launcher, module, _ = sys.argv
    connection = socket.socket(fileno=int(handle))
    importlib.import_module(module)
    gc.freeze()  # a collection would copy pages that are shared so far
    while True:
        _, files, _, _ = socket.recv_fds(connection, 1, 2)
        if not files:
            return
        request = json.loads(connection.makefile("rb").readline())
        if _fork_twice(int(launcher)):
            break
        for file in files:
            os.close(file)
    _become(request["rank"], request["environ"], files, module)
    connection.sendall(str(os.getpid()).encode())
    connection.close()
    sys.exit(importlib.import_module(module).main())


def _fork_twice(launcher: int) -> bool:
    """Whether this is the new process, once it is the launcher's child."""
    middle = os.fork()
    if middle:
        if os.waitpid(middle, 0)[1]:
            raise ChildProcessError("no process could be made")
        return False
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(_POLL_S)
    _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _become(rank: int, environ: Mapping[str, str], files: list[int], module: str) -> None:
    """Take on what `processes.start_worker` gives to a process that it starts."""
    os.setsid()
    for file, place in zip(files, (1, 2), strict=True):
        os.dup2(file, place)
        os.close(file)
    locale = {name: os.environ[name] for name in _LOCALE if name in os.environ}
    os.environ.clear()
    os.environ.update({**locale, **environ})
    sys.argv = [str(sys.modules[module].__file__), f"rank{rank}"]
    with contextlib.suppress(OSError):  # no /proc here
        _show_command(f"{sys.executable} -m {module} rank{rank}")


def _show_command(line: str) -> None:
    """Change the command line that others see: the kernel reads it in the process's own memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = line.encode()[: end - begin - 2]
    # An area that does not end with a zero is one string, up to its first zero.
    ctypes.memmove(begin, text.ljust(end - begin - 1, b"\0") + b".", end - begin)


def _control_process(option: int, value: int) -> None:
    """The system's prctl. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
