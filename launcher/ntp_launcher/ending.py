"""How every command ends: errors in one line, no traceback for Ctrl-C or `| head`."""

import signal
from collections.abc import Callable

from ntp.errors import NtpError
from ntp_launcher.output import ReaderLeftError, complain, output_is_the_result


def ending(command: str, run: Callable[[], int]) -> int:
    """The exit code: what `run` returns, an error's own, or 128 + the signal that ended it."""
    try:
        with output_is_the_result():
            return run()
    except ReaderLeftError:
        return 128 + signal.SIGPIPE
    except NtpError as error:
        complain(command, str(error))
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        complain(command, f"cannot use {str(error.filename)!r}: {error.strerror}")
        return NtpError.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
