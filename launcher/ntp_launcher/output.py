"""Standard output that can no longer be written: its reader has gone (`| head`), or its disk is full.

For a run it is dispensable: what cannot be shown is not worth a run, whose results are in its directory. For
every other command it is the result, and the command ends.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from ntp.errors import NtpError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(NtpError):
    """Standard output cannot be written."""


class ReaderLeftError(OutputError):
    """Nobody reads standard output any more."""


class _Stream(io.FileIO):
    """A descriptor that asks `failed` what to do when it cannot be written: raise, or go on in silence.

    Either way nothing written to it from then on goes anywhere, what is buffered included: Python would
    complain of that at its end.
    """

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._failed = failed

    def write(self, data: "ReadableBuffer", /) -> int:
        """Takes all of the data where the descriptor fails."""
        try:
            return super().write(data)
        except OSError as error:
            _silence(self.fileno())
            self._failed(error)
            return memoryview(data).nbytes


@contextmanager
def output_is_the_result() -> Iterator[None]:
    """In this context, OutputError or ReaderLeftError where stdout cannot be written."""
    with _replaced("stdout", _refuse):
        yield


@contextmanager
def output_is_dispensable(command: str) -> Iterator[None]:
    """In this context, one line on stderr where stdout cannot be written; then silence, as for stderr."""

    def tell(error: OSError) -> None:
        sys.stderr.write(
            f"{command}: stdout cannot be written any more ({error.strerror}); "
            "the run goes on, its results are in the run directory\n"
        )
        sys.stderr.flush()

    with _replaced("stderr", lambda _: None), _replaced("stdout", tell):
        yield


_WIDE = 1 << 10  # columns; more than any table has


def table_console() -> Console:
    """The console of tables: a terminal's own width, or all that a table needs where there is none."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def complain(command: str, message: str) -> None:
    """One line on stderr, whatever the message holds; nothing where it cannot be written."""
    try:
        sys.stderr.write(f"{command}: {' '.join(message.split())}\n")
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr.fileno())


@contextmanager
def _replaced(name: Literal["stdout", "stderr"], failed: Callable[[OSError], None]) -> Iterator[None]:
    """One of `sys`, line by line through a `_Stream`; it is left alone where it has no descriptor."""
    original = getattr(sys, name)
    try:
        original.flush()
        descriptor = original.fileno()
    except io.UnsupportedOperation:
        yield
        return
    buffered = io.BufferedWriter(_Stream(descriptor, failed))
    stream = io.TextIOWrapper(buffered, original.encoding, original.errors, line_buffering=True)
    setattr(sys, name, stream)
    try:
        yield
    finally:
        try:
            stream.flush()
        finally:
            setattr(sys, name, original)


def _refuse(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        raise ReaderLeftError("nobody reads stdout any more")
    raise OutputError(f"cannot write to stdout: {error.strerror}")


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
