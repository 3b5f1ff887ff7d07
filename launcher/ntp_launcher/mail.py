"""Letters between agents, through the control store: each box has one writer and one reader, in order.

A box belongs to one session of an agent, so that nobody reads what was meant for its predecessor.

| key                          | writer  | reader  | value                                            |
|------------------------------|---------|---------|--------------------------------------------------|
| `event/<node>.<session>/<n>` | agent   | leader  | an event                                         |
| `order/<node>.<session>/<n>` | leader  | agent   | an action                                        |
| `lease/<node>.<session>`     | agent   | leader  | `Pulse`; one that stays the same is a lost agent |
| `hello/<n>`                  | late agent | leader | what it is; `hellos` counts them              |
| `welcome/<n>`                | leader  | late agent | its place, or why there is none               |
| `left/<node>.<session>`      | agent   | leader  | it has seen the end                              |
| `dropped/<node>.<session>`   | leader  | agent   | the job goes on without it                       |
| `end`                        | leader  | agents  | `End`                                            |
"""

import json
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store

from ntp_launcher.events import Mailed, from_json, to_json

END = "end"
HELLOS = "hellos"


@dataclass(frozen=True, slots=True)
class Post:
    """An agent's place: its node, and which agent of that node it is."""

    node: int
    session: int

    def __str__(self) -> str:
        return f"{self.node}.{self.session}"


class Outbox:
    """The writing end of a box: `event` or `order`."""

    def __init__(self, store: Store, kind: str, post: Post) -> None:
        self._store, self._key, self._sent = store, f"{kind}/{post}", 0

    def send(self, message: Mailed) -> None:
        """Puts a letter in."""
        self._store.set(f"{self._key}/{self._sent}", json.dumps(to_json(message)))
        self._sent += 1


class Inbox:
    """The reading end of a box."""

    def __init__(self, store: Store, kind: str, post: Post) -> None:
        self._store, self._key, self._read = store, f"{kind}/{post}", 0

    def take(self) -> list[Mailed]:
        """The letters that have come since the last look."""
        letters: list[Mailed] = []
        while (value := take(self._store, f"{self._key}/{self._read}")) is not None:
            letters.append(from_json(json.loads(value)))
            self._read += 1
        return letters


def take(store: Store, key: str) -> str | None:
    """The value under a key, which is deleted; None if there is none."""
    value = peek(store, key)
    if value is not None:
        store.delete_key(key)
    return value


def peek(store: Store, key: str) -> str | None:
    """The value under a key, None if there is none."""
    return store.get(key).decode() if store.check([key]) else None


def lease_key(post: Post) -> str:
    """Where an agent renews its lease."""
    return f"lease/{post}"


def left_key(post: Post) -> str:
    """Where an agent says that it has seen the end."""
    return f"left/{post}"


def dropped_key(post: Post) -> str:
    """Where an agent learns that it has been given up, should it not know by its lease."""
    return f"dropped/{post}"


def read_json(store: Store, key: str) -> Any:
    """The JSON value under a key, None if there is none."""
    value = peek(store, key)
    return None if value is None else json.loads(value)
