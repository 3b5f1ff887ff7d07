"""A file that grows by whole lines, also on a disk that is full for a while."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 16


class LineFile:
    """Appends lines to a file. What cannot be written is kept, in order, and written when it can be.

    A last line that was cut off when whoever wrote it was killed is removed.

    Attributes:
        trouble: why the newest lines are not on the disk; "" where all are.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        _remove_what_was_cut_off(path)
        self._kept = b""
        self.trouble = ""

    def append(self, line: str) -> None:
        """Write one line, given without its end."""
        self._kept += f"{line}\n".encode()
        self.flush()

    def flush(self) -> None:
        """Try once more to write what is kept: all of it, or nothing."""
        if not self._kept:
            return
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._kept) != len(self._kept):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.trouble = error.strerror or str(error)
            with suppress(OSError):
                self._file.truncate(end)
        else:
            self._kept, self.trouble = b"", ""

    def close(self) -> None:
        """Give the file up, and what could not be written with it."""
        self.flush()
        self._file.close()


def _remove_what_was_cut_off(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
        if whole < size:
            file.truncate(whole)


def _end_of_last_line(file: BinaryIO, end: int) -> int:
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
