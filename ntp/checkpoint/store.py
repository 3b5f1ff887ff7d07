"""A directory of checkpoints, and how one appears in it whole or not at all.

A save fills `step-N.XXXX.tmp`, syncs every file and the folder, renames it to `step-N` in one step, syncs the
directory, and only then points the file `latest` at it. What is removed is renamed away first. So a folder
without a suffix is always complete, whatever moment a process was killed at; and a save that outlives its
generation of ranks has a folder of its own, whose removal it can only notice, never publish half of.
"""

import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ntp.checkpoint.manifest import MANIFEST
from ntp.config import Config
from ntp.errors import CheckpointError

LATEST = "latest"
_EARLIER = "earlier"
_SOURCE = "source"
_NAME = re.compile(r"step-([0-9]{8,})")
_UNFINISHED = re.compile(r"step-[0-9]{8,}\.[0-9a-z]+\.(tmp|removed)")


def named_step(resume: str) -> int | None:
    """The step that `--resume` asks for; None for `auto` and for a path."""
    return int(resume) if re.fullmatch(r"[0-9]{1,18}", resume) else None


class CheckpointStore:
    """The checkpoints below `directory`, which need not exist before the first save."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after `step`."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a complete folder, ascending. CheckpointError where they may not be listed."""
        return _steps_in(self._names())

    def unfinished(self) -> list[str]:
        """Folders that a killed save or removal has left."""
        return sorted(name for name in self._names() if _UNFINISHED.fullmatch(name))

    def newest(self) -> int:
        """The step of the best of the checkpoints here; 0 where there is none."""
        return next(iter(_down_from(self.steps(), self.latest())), 0)

    def latest(self) -> int | None:
        """The step that `latest` names; None where there is no such file or it names no folder."""
        try:
            match = _NAME.fullmatch((self.directory / LATEST).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return None
        return int(match[1]) if match and self.path(int(match[1])).is_dir() else None

    def candidates(self, step: int | None = None) -> list[Path]:
        """Checkpoints to try, best first: `step` and the older ones.

        Without `step` it is the one that `latest` names: what is newer was left by a run that this one has
        gone back behind. Where `latest` is lost it is the newest. A run that has saved none yet has the one
        elsewhere that it began with.

        Raises CheckpointError where there is none of `step`.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            found = ", ".join(str(s) for s in steps) or "none"
            raise CheckpointError(
                f"no checkpoint of step {step} in {str(self.directory)!r}; there are: {found}"
            )
        if not steps:
            return self._source()
        return [self.path(s) for s in _down_from(steps, self.latest() if step is None else step)]

    def come_from(self, checkpoint: Path) -> None:
        """Note a checkpoint elsewhere: until the run has saved one of its own, it goes on from there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._replace(_SOURCE, f"{checkpoint.absolute()}\n")

    def belong_to(self, checkpoint: Path | None) -> Path | None:
        """Make this the directory of a run that begins with `checkpoint`; None = with none.

        What is there but was not made on the way to that state must not pass for this run's.

        Returns:
            Where checkpoints of another run have been moved to, if there were any.

        Raises OSError where they cannot be found or moved.
        """
        if checkpoint is not None and self._is_one_of_ours(checkpoint):
            if self.latest() != _step_of(checkpoint):
                self._point_at(checkpoint)
            return None
        away = self._move_away(_steps_in(self._folders()))
        (self.directory / _SOURCE).unlink(missing_ok=True)
        if checkpoint is not None:
            self.come_from(checkpoint)
        return away

    def _move_away(self, steps: Sequence[int]) -> Path | None:
        if not steps:
            return None
        (self.directory / LATEST).unlink(missing_ok=True)
        numbers = itertools.count(1)
        away = next(p for n in numbers if not (p := self.directory / f"{_EARLIER}-{n}").exists())
        away.mkdir()
        for step in steps:
            self.path(step).rename(away / self.path(step).name)
        return away

    def begin(self, step: int) -> Path:
        """An empty temporary folder for the checkpoint of `step`; what earlier saves have left is removed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in self.unfinished():
            self._remove(self.directory / name)
        path = self._beside(step, "tmp")
        path.mkdir()
        return path

    def publish(self, step: int, temporary: Path, manifest_text: str) -> Path:
        """Turns a temporary folder, whose files are synced, into the checkpoint of `step`."""
        path = self.path(step)
        write_durably(temporary / MANIFEST, manifest_text)
        sync_directory(temporary)
        if path.exists():  # a run that went back comes here again
            if self.latest() == step:
                (self.directory / LATEST).unlink()
            self._remove(path)
        temporary.rename(path)  # fails if a later save has taken the folder away
        sync_directory(self.directory)
        self._point_at(path)
        return path

    def prune(self, step: int, keep: int) -> None:
        """Removes all but the `keep` newest checkpoints up to `step`; 0 keeps all. What may not be stays."""
        older = [s for s in self.steps() if s <= step]
        for old in older[:-keep] if keep else ():
            with suppress(OSError):
                self._remove(self.path(old))

    def _is_one_of_ours(self, checkpoint: Path) -> bool:
        """Whether it lies here, under a name that we give; a copy under another is somebody else's."""
        path = checkpoint.resolve()
        return path.parent == self.directory.resolve() and _NAME.fullmatch(path.name) is not None

    def _source(self) -> list[Path]:
        """What `come_from` has noted, if anything."""
        try:
            return [Path((self.directory / _SOURCE).read_text(encoding="utf-8").removesuffix("\n"))]
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {str(self.directory / _SOURCE)!r}: {error}") from None

    def _point_at(self, path: Path) -> None:
        self._replace(LATEST, path.name + "\n")

    def _replace(self, name: str, text: str) -> None:
        temporary = self.directory / f"{name}.tmp"
        write_durably(temporary, text)
        temporary.replace(self.directory / name)
        sync_directory(self.directory)

    def _remove(self, path: Path) -> None:
        """Renames a folder away, in one step, then removes it; one that another save removes is as good."""
        away = self._beside(_step_of(path), "removed")
        try:
            path.rename(away)
        except FileNotFoundError:
            return
        shutil.rmtree(away, ignore_errors=True)  # what stays is tried again at the next save

    def _beside(self, step: int, suffix: str) -> Path:
        """A name that nobody has used."""
        return self.directory / f"{self.path(step).name}.{secrets.token_hex(4)}.{suffix}"

    def _names(self) -> list[str]:
        """`_folders`; CheckpointError where they may not be listed."""
        try:
            return self._folders()
        except OSError as error:
            where = f"the checkpoints in {str(self.directory)!r}"
            raise CheckpointError(f"cannot read {where}: {error.strerror}") from None

    def _folders(self) -> list[str]:
        """The names of the folders in the directory: a plain file is no checkpoint, whatever its name.

        A link that leads nowhere is not a directory that does not exist yet: its disk may be missing.
        """
        try:
            return [entry.name for entry in self.directory.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            if self.directory.is_symlink():
                raise
            return []


def _down_from(steps: Sequence[int], top: int | None) -> list[int]:
    """Those up to `top`, or all, descending."""
    return [step for step in reversed(steps) if top is None or step <= top]


def _steps_in(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _step_of(path: Path) -> int:
    match = re.match("step-([0-9]+)", path.name)
    assert match is not None, path
    return int(match[1])


def checkpoint_directory(config: Config, run_dir: Path) -> Path:
    """`checkpoint.dir`, or a folder in the run directory."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir else run_dir / "checkpoints"


def write_durably(path: Path, text: str) -> None:
    """Writes a new file and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
