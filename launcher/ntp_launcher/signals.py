"""Signals that end the launcher: torch.distributed.elastic's SignalException, in the main thread.

It comes between any two instructions, also between the start of a process and the line that keeps it: nobody
would end that process. `held` puts it off.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class _Holder:
    """How many `held` contexts are open, and the signal that came in them."""

    def __init__(self) -> None:
        self.depth = 0
        self.came: signal.Signals | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises, or keeps the first signal for the end of the outermost context."""
        self.came = self.came or signal.Signals(number)
        if not self.depth:
            self.give()

    def give(self) -> None:
        """Raises SignalException for a signal that has come."""
        if self.came is not None:
            came, self.came = self.came, None
            raise SignalException(f"received {came.name}", came)


_holder = _Holder()


def raise_signals() -> None:
    """From now on SIGTERM, SIGINT, SIGHUP and SIGQUIT raise SignalException in the main thread."""
    for number in _ENDING:
        signal.signal(number, _holder.handle)


@contextmanager
def held() -> Iterator[None]:
    """For the main thread: a signal that comes in this context raises at its end. For short work only."""
    _holder.depth += 1
    try:
        yield
    finally:
        _holder.depth -= 1
        if not _holder.depth:
            _holder.give()
