"""What agents tell each other, on the rendezvous store of one round.

Values are small JSON texts under a key per agent; nobody overwrites another's. Nothing here blocks longer
than a stated time, except `exchange`, which waits as long as the store's own time-out for a slow starter.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from ntp.control import Store

_POLL_S = 0.05
_LINGER_S = 0.5


class Board:
    """The agents' bulletin board. A lost store shows as RuntimeError."""

    def __init__(self, store: Store, group_rank: int, group_size: int) -> None:
        self._store, self._rank, self._size = store, group_rank, group_size

    def exchange(self, topic: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every agent's value, by group rank; returns when all are there."""
        self.post(topic, value)
        return [json.loads(self._store.get(_key(topic, rank))) for rank in range(self._size)]

    def post(self, topic: str, value: dict[str, Any]) -> None:
        """Puts up this agent's value."""
        self._store.set(_key(topic, self._rank), json.dumps(value))

    def read(self, topic: str) -> dict[int, dict[str, Any]]:
        """The values that are up now, by group rank."""
        keys = {rank: _key(topic, rank) for rank in range(self._size)}
        return {r: json.loads(self._store.get(k)) for r, k in keys.items() if self._store.check([k])}

    def collect(self, topic: str, timeout_s: float) -> dict[int, dict[str, Any]]:
        """The values of all agents, or of those that have put one up within `timeout_s`."""
        _wait(lambda: len(self.read(topic)) == self._size, timeout_s)
        return self.read(topic)

    def any_up(self, topic: str) -> bool:
        """Whether an agent has put up a value."""
        return any(self._store.check([_key(topic, rank)]) for rank in range(self._size))

    def all_up(self, topic: str) -> bool:
        """Whether every agent has put up a value."""
        return self._store.check([_key(topic, rank) for rank in range(self._size)])

    def farewell(self, timeout_s: float) -> None:
        """Stays until every agent has come here, and a moment longer.

        One of the agents hosts the store, none knows which; the moment lets the others see that all are here
        before the store goes.
        """
        self._store.add("ntp/left", 1)
        _wait(lambda: self._store.add("ntp/left", 0) >= self._size, timeout_s)
        if self._size > 1:
            time.sleep(_LINGER_S)


def _key(topic: str, rank: int) -> str:
    return f"ntp/{topic}/{rank}"


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
