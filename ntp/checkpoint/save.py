"""Saving behind the training steps.

    saver.prepare(optimizer)        # once, before the first save: host memory
    saver.save(optimizer, step, store, keep)    # after the commit of `step`; returns at once
    saver.wait_staged()                         # before the next commit: the state may change from here on
    saver.poll()                                # reports of saves that have ended
    saver.finish()                              # waits for the save under way

A thread copies what this rank saves to host memory while the next step computes (`ntp.checkpoint.staging`),
writes it, and agrees with the other ranks over a group of its own. One save is under way at a time: `save`
waits for the one before, so a disk slower than the interval slows training down instead of filling memory. A
save that fails anywhere (disk full, a rank's writer dead) fails everywhere with the same words, leaves the
older checkpoints as they are, and training goes on.
"""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ntp.checkpoint.figures import gbytes_s
from ntp.checkpoint.manifest import FileRecord, Manifest, Piece, check_files
from ntp.checkpoint.pieces import tensor_shapes, write_shards
from ntp.checkpoint.staging import Staging
from ntp.checkpoint.store import CheckpointStore
from ntp.collectives import Group
from ntp.config import Config
from ntp.errors import CheckpointError
from ntp.messages import gather_values
from ntp.optim import DistributedOptimizer


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended, the same on every rank but for times.

    Attributes:
        directory: of the checkpoints that it belongs to.
        error: why it failed, None where it did not.
        lost_touch: it failed because another rank has gone; who else knows is not known.
        bytes: written by all ranks together.
        seconds: from the start to the last disk sync.
        stall_s: how long training stood still for it on this rank.
    """

    step: int
    directory: Path
    error: str | None
    bytes: int
    seconds: float
    stall_s: float
    lost_touch: bool = False

    def line(self) -> str:
        """One line for the terminal."""
        if self.error is not None:
            return f"checkpoint of step {self.step} failed, training goes on: {self.error}"
        return (
            f"checkpoint of step {self.step}: {self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
            f" ({gbytes_s(self.bytes, self.seconds):.3f} GB/s), stall {self.stall_s:.3f} s"
        )


class _Job:
    """A save under way."""

    def __init__(self, step: int, store: CheckpointStore, keep: int):
        self.step, self.store, self.keep = step, store, keep
        self.staging: Staging | None = None
        self.started = time.monotonic()
        self.staged = threading.Event()
        self.stall_s = 0.0
        self.bytes = 0
        self.error: str | None = None
        self.lost_touch = False
        self.ended = self.started
        self.thread: threading.Thread | None = None

    def report(self) -> SaveReport:
        return SaveReport(
            step=self.step,
            directory=self.store.directory,
            error=self.error,
            bytes=self.bytes,
            seconds=self.ended - self.started,
            stall_s=self.stall_s,
            lost_touch=self.lost_touch,
        )


class Saver:
    """Saves the state of one rank.

    Args:
        group: every worker; carries host tensors and is used by nothing else.
        config: goes into the manifest.
    """

    def __init__(self, group: Group, config: Config):
        self._group, self._config = group, config
        self._job: _Job | None = None
        self._ended: list[SaveReport] = []
        self._staging: Staging | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, optimizer: DistributedOptimizer) -> None:
        """Start making the host memory, which takes seconds for gigabytes that are pinned."""
        if self._preparing is None:
            self._preparing = threading.Thread(target=self._allocate, args=(optimizer,), daemon=True)
            self._preparing.start()

    def _allocate(self, optimizer: DistributedOptimizer) -> Staging:
        if self._staging is None or not self._staging.fits(optimizer):
            self._staging = None  # its memory goes before more is asked for
            self._staging = Staging(optimizer)
        return self._staging

    def save(self, optimizer: DistributedOptimizer, step: int, store: CheckpointStore, keep: int) -> None:
        """Start saving the state after `step`; every worker calls it, and has not begun the next commit.

        Args:
            keep: how many checkpoints stay in `store`, 0 = all.
        """
        before = time.monotonic()
        self.finish()
        if self._preparing is not None:
            self._preparing.join()
        job = self._job = _Job(step, store, keep)
        stage, shapes = self._stage(job, optimizer), tensor_shapes(optimizer.buffer.specs)
        job.thread = threading.Thread(
            target=self._run, args=(job, stage, shapes), name=f"checkpoint{step}", daemon=True
        )
        job.thread.start()
        job.stall_s += time.monotonic() - before

    def _stage(self, job: _Job, optimizer: DistributedOptimizer) -> Callable[[], None]:
        """What copies the state as it is now, in another thread; it raises what kept the memory from it."""
        try:
            job.staging = self._allocate(optimizer)
            return job.staging.copier()
        except (OSError, RuntimeError) as error:
            return partial(_raise, error)

    def wait_staged(self) -> None:
        """Return when the state of the save under way is in host memory and may change."""
        if self._job is not None:
            before = time.monotonic()
            self._job.staged.wait()
            self._job.stall_s += time.monotonic() - before

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that have ended since the last call, oldest first."""
        if self._job is not None and self._job.thread is not None and not self._job.thread.is_alive():
            self._ended.append(self._job.report())
            self._job = None
        ended, self._ended = self._ended, []
        return ended

    def finish(self) -> None:
        """Wait for the save under way; `poll` has its report."""
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()
            self._ended.append(self._job.report())
            self._job = None

    def _run(self, job: _Job, stage: Callable[[], None], shapes: dict[str, tuple[int, int]]) -> None:
        try:
            self._save(job, stage, shapes)
        except CheckpointError as error:
            job.error = str(error)
        # Mostly a lost peer. Of any kind: the thread has only its report to speak by, and one that ended
        # without an error in it would pass for a checkpoint that is on disk.
        except Exception as error:  # noqa: BLE001
            job.error, job.lost_touch = f"lost touch with the other ranks: {error}", True
        finally:
            job.ended = time.monotonic()
            job.staged.set()

    def _save(self, job: _Job, stage: Callable[[], None], shapes: dict[str, tuple[int, int]]) -> None:
        """The steps of a save; each is agreed on before the next, so that all ranks end at the same one."""

        def prepare() -> str | None:
            stage()
            job.staged.set()
            return str(job.store.begin(job.step)) if self._group.leads else None

        def write(folder: Path) -> list[Any]:
            assert job.staging is not None
            if not job.staging.shards:
                return []
            path = folder / f"pieces-{self._group.rank:05d}.safetensors"
            record, pieces = write_shards(path, job.staging.shards)
            return [record.to_json(), [piece.to_json() for piece in pieces]]

        def publish(folder: Path, written: list[Any]) -> None:
            if self._group.leads:
                self._publish(job, folder, shapes, written)

        folder = Path(next(name for name in self._agree(prepare) if name))
        try:
            written = [values for values in self._agree(lambda: write(folder)) if values]
            job.bytes = sum(record[1] for record, _ in written)
            self._agree(lambda: publish(folder, written))
        except CheckpointError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _publish(
        self, job: _Job, folder: Path, shapes: dict[str, tuple[int, int]], written: list[Any]
    ) -> None:
        manifest = Manifest(
            step=job.step,
            config=self._config.model_dump(mode="json"),
            shapes=shapes,
            files=tuple(FileRecord(*record) for record, _ in written),
            pieces=tuple(Piece.from_json(values) for _, pieces in written for values in pieces),
        )
        check_files(folder, manifest)  # not there: the hosts share no file system
        job.store.publish(job.step, folder, manifest.text())
        job.store.prune(job.step, job.keep)

    def _agree(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank and return what each returned.

        Raises CheckpointError on every rank where it failed on one.
        """
        value, error = None, None
        try:
            value = action()
        # Of any kind: a rank that left here would let all others wait for it in the next line.
        except Exception as failure:  # noqa: BLE001 - raised below, on every rank
            error = _reason(failure)
        outcomes = gather_values(self._group, {"value": value, "error": error})
        for rank, outcome in zip(self._group.ranks, outcomes, strict=True):
            if outcome["error"] is not None:
                raise CheckpointError(f"rank {rank}: {outcome['error']}")
        return [outcome["value"] for outcome in outcomes]


def _raise(error: Exception) -> None:
    raise error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f" ({Path(str(error.filename)).name})" if error.filename else ""
        return f"{error.strerror}{place}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
