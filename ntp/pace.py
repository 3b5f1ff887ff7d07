"""The host, kept close to the device.

A full queue of launches holds the interpreter's lock and the driver's, and with them the thread that hears of
a dead peer and ends the waits for it.
"""

from collections import deque

import torch


class Pace:
    """Holds the host back where the device is more than `ahead` marks behind."""

    def __init__(self, ahead: int):
        self._ahead = ahead
        self._marks: deque[torch.cuda.Event] = deque()

    def keep(self, mark: torch.cuda.Event) -> None:
        """Wait for the oldest mark that may not be under way any more; `mark` is the newest, recorded."""
        self._marks.append(mark)
        if len(self._marks) > self._ahead:
            self._marks.popleft().synchronize()

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()
