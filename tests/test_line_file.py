"""Lines that outlive a full disk and a writer that was killed."""

import os
from pathlib import Path

import pytest

from ntp.line_file import LineFile


def lines(path):
    return path.read_text().splitlines()


def test_what_a_full_disk_refuses_is_kept_and_written_in_order(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append("one")
    limit = path.stat().st_size + 5

    class Full:
        """A disk with room for five bytes more."""

        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            return getattr(self._real, name)

        def write(self, data):
            return self._real.write(data[: limit - path.stat().st_size])

    real = file._file
    monkeypatch.setattr(file, "_file", Full(real))
    file.append("two")
    assert file.trouble == ""
    file.append("three")
    assert file.trouble == "No space left on device"
    assert lines(path) == ["one", "two"], "a line is there as a whole or not at all"
    file.append("four")
    assert lines(path) == ["one", "two"]
    monkeypatch.setattr(file, "_file", real)
    file.append("five")
    assert file.trouble == ""
    file.close()
    assert lines(path) == ["one", "two", "three", "four", "five"]


def test_a_disk_that_is_full_to_the_end_is_no_error_but_trouble():
    file = LineFile(Path("/dev/full"))
    file.append("one")
    assert file.trouble == "No space left on device"
    file.close()


@pytest.mark.parametrize("before", ["", "whole\n", "whole\n" * 30_000])
def test_a_line_that_was_cut_off_is_removed(tmp_path, before):
    path = tmp_path / "lines"
    path.write_text(before + "cut" * 30_000)
    file = LineFile(path)
    file.append("new")
    file.close()
    assert path.read_text() == before + "new\n"


def test_a_whole_file_is_not_touched_before_a_line_is_written(tmp_path):
    path = tmp_path / "lines"
    path.write_text("whole\n")
    os.utime(path, (1, 1))
    LineFile(path).close()
    assert path.stat().st_mtime == 1
