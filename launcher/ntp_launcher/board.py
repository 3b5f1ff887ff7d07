"""What agents tell each other, on the rendezvous store of one round, before there is a control store.

Values are small JSON texts under a key per agent; nobody overwrites another's, nothing blocks for ever.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError

from ntp.control import Store

_POLL_S = 0.05
_LINGER_S = 0.5
_PATIENCE_S = 60.0  # for agents that have met already


class Board:
    """The agents' bulletin board. A lost store shows as RuntimeError."""

    def __init__(self, store: Store, group_rank: int, group_size: int) -> None:
        self._store, self._rank, self._size = store, group_rank, group_size

    def exchange(self, topic: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every agent's value, by group rank. Raises RendezvousError where one has gone after the meeting."""
        self.post(topic, value)
        keys = [_key(topic, rank) for rank in range(self._size)]
        _wait(lambda: self._store.check(keys), _PATIENCE_S)
        silent = sum(not self._store.check([key]) for key in keys)
        if silent:
            raise RendezvousError(f"{silent} of {self._size} agents went away after they had met")
        return [json.loads(self._store.get(key)) for key in keys]

    def post(self, topic: str, value: dict[str, Any]) -> None:
        """Puts up this agent's value."""
        self._store.set(_key(topic, self._rank), json.dumps(value))

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
