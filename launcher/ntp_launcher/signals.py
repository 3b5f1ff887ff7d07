"""Signals that end the launcher: the first raises torch.distributed.elastic's SignalException, once.

It comes between any two instructions of the main thread, also between the start of a process and the line
that keeps it, when nobody would end that process: `held` puts it off. Later ones only hurry the end that is
under way (`is_hurried`). Whatever holds it up, a reader of stdout that does not read or a store that does not
answer, the launcher is gone `LAST_S` after the first signal, and its workers with it (see `child`).
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

LAST_S = 20.0  # more than workers and other agents are waited for together
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class _Ending:
    """What has come since `ending_signals` began, and how many `held` contexts are open."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_given, self.is_hurried = False, False
        self.depth = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self.first is not None:
            self.is_hurried = True
            return
        self.first = signal.Signals(number)
        deadline = threading.Timer(LAST_S, os._exit, [128 + number])
        deadline.daemon = True
        deadline.start()
        self.give()

    def give(self) -> None:
        """Raises the first signal, unless it is held, or has been raised."""
        if self.first is not None and not self.depth and not self.is_given:
            self.is_given = True
            raise SignalException(f"received {self.first.name}", self.first)


_ending = _Ending()


@contextmanager
def ending_signals() -> Iterator[None]:
    """In this context SIGTERM, SIGINT, SIGHUP and SIGQUIT raise SignalException in the main thread."""
    global _ending
    _ending = _Ending()
    previous = {number: signal.signal(number, _ending.handle) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """For the main thread: a signal that comes in this context raises at its end."""
    _ending.depth += 1
    try:
        yield
    finally:
        _ending.depth -= 1
        _ending.give()


def is_hurried() -> bool:
    """Whether a second signal has come: nobody wants to wait any more."""
    return _ending.is_hurried
