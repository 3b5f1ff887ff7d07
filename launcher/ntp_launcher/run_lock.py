"""One run directory, one job: whoever leads a job holds a lock on a file there for as long as it has workers.

The kernel takes the lock back when its process ends, however it ends; no worker inherits it. The file stays.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ntp_launcher.flags import LaunchError
from ntp_launcher.job import writing

LOCK = ".lock"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the lock of a run directory that exists. Raises LaunchError where another job has it.

    A file system without locks is used without one.
    """
    with writing(str(run_dir)):
        file = (run_dir / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another launcher"
            raise LaunchError(
                f"the run directory {str(run_dir)!r} is in use by a running job ({holder}); "
                "give another --run-dir"
            ) from None
        except OSError:
            pass
        else:
            with suppress(OSError):  # a full disk: only who holds the lock stays unknown
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
