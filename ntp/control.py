"""A worker's side of the control store: hears of new generations, tells what it is doing.

A thread looks for the newest generation; the thread that trains asks `check` before every collective and is
thereby taken out of a generation that is over, also where none of its own peers has gone. What the keys mean
is in `ntp.protocol`.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ntp.collectives import MembershipChangedError
from ntp.protocol import FINISHED, GENERATION, Beat, Generation, Phase, arrived_key, beat_key

_POLL_S = 0.02


class Store(Protocol):
    """The part of a c10d store that is needed. A lost store shows as RuntimeError."""

    def set(self, key: str, value: str, /) -> None:
        """Writes, over what was there."""
        ...

    def get(self, key: str, /) -> bytes:
        """Reads; waits for the key, as long as the store's time-out."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Counts; returns the new number. 0 reads it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...


class FencedError(RuntimeError):
    """The job goes on without this process: it must end and write nothing."""


class Control:
    """The control store as one worker sees it.

    Args:
        connect: opens a connection; one is used by the thread that trains, one by the thread that watches.
        rank: process rank of this worker.

    Attributes:
        on_over: called by the watching thread when a generation is over at once; frees a thread that waits
            inside a collective that its dead peers will never finish.
    """

    def __init__(self, connect: Callable[[], Store], rank: int):
        self._store = connect()
        self._watched = connect()
        self._rank = rank
        self._beats = 0
        self._newest: Generation | None = None
        self._current = -1
        self.on_over: Callable[[], None] = _do_nothing
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)
        self._thread.start()

    def enter(self, phase: Phase, step: int) -> None:
        """Tell what this worker is doing from now on."""
        self._beats += 1
        self._store.set(beat_key(self._rank), Beat(self._current, step, phase, self._beats).to_json())

    def microbatch(self, step: int, gradients: Tensor) -> None:
        """A microbatch is a sign of life of its own."""
        del gradients
        self.enter(Phase.STEP, step)

    def close(self) -> None:
        """Stop watching; a thread that lives on at the end of the process would end it badly."""
        self._closed.set()
        self._thread.join()

    def absent(self) -> set[int]:
        """The ranks that the newest generation lacks, this one not counted; none before one is heard of."""
        return set(self._newest.failed if self._newest is not None else ()) - {self._rank}

    def wants_switch(self) -> bool:
        """Whether a newer generation is to begin after the step under way."""
        newest = self._newest
        return newest is not None and newest.generation > self._current

    def check(self) -> None:
        """Raise MembershipChangedError if the current generation is over."""
        newest = self._newest
        if newest is not None and newest.generation > self._current and not newest.at_boundary:
            raise MembershipChangedError(f"generation {newest.generation}: {newest.cause}")

    def next_generation(self, has_worked: bool, timeout_s: float | None = None) -> Generation | None:
        """The newest generation, as soon as it is newer than the current one and has this rank in it.

        None once the job is finished.

        Args:
            has_worked: this process has held state; a generation that excludes it does not want it any more.
                A process that has not waits to be taken in.
            timeout_s: how long to wait, None = for ever.

        Raises:
            FencedError: the job goes on without this process.
            TimeoutError: nobody has opened a new generation.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            newest = self._newest
            if newest is not None and newest.generation > self._current:
                if self._rank not in newest.failed:
                    self._current = newest.generation
                    return newest
                if has_worked:
                    raise FencedError(f"generation {newest.generation} goes on without rank {self._rank}")
            if self._store.check([FINISHED]):
                return None
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"no generation after {self._current} within {timeout_s} s")
            time.sleep(_POLL_S / 4)

    def arrive(self, size: int) -> bool:
        """Wait until `size` processes have come to the start of the current generation.

        Returns:
            False where the others have finished the job in the generation before.

        Raises:
            MembershipChangedError: a newer generation has been opened meanwhile.
        """
        key = arrived_key(self._current)
        self._store.add(key, 1)
        while self._store.add(key, 0) < size:
            if self.wants_switch():
                raise MembershipChangedError("a newer generation is open")
            if self.has(FINISHED):
                return False
            time.sleep(_POLL_S / 4)
        return True

    def put(self, key: str, value: str) -> None:
        """Leave a message for the launcher."""
        self._store.set(key, value)

    def has(self, key: str) -> bool:
        """Whether a message is there."""
        return self._store.check([key])

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._watched.check([GENERATION]):
                newest = Generation.from_json(self._watched.get(GENERATION))
                if self._newest is None or newest.generation > self._newest.generation:
                    self._newest = newest
                    if not newest.at_boundary:
                        self.on_over()


def _do_nothing() -> None:
    return
