"""How every command but `ntp-launch` ends: errors in one line, no traceback for Ctrl-C or `| head`."""

import os
import signal
import sys
from collections.abc import Callable

from ntp.errors import NtpError


def ending(command: str, run: Callable[[], int]) -> int:
    """The exit code: what `run` returns, an error's own, or 128 + the signal that ended it."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except NtpError as error:
        sys.stderr.write(f"{command}: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # what is still buffered must go somewhere, or Python complains at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
