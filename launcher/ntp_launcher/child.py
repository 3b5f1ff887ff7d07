"""`python child.py PARENT COMMAND...`: becomes COMMAND, which the kernel kills when the launcher dies.

A launcher that is killed with SIGKILL cannot clean up, so every worker asks the kernel to do it
(PR_SET_PDEATHSIG survives exec). The parent may be gone before that request: hence the check after it.
Uses nothing but the standard library's cheap modules, because it runs once per worker.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and replaces it with the command."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
