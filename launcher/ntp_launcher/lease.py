"""An agent's lease: it says that the agent can reach the job, and the job counts on it.

A thread renews it. Another one, which needs no store and never blocks, kills the node's workers when it has
run out: before the coordinator, which is more patient (`PATIENCE`), may go on without the node. So a
partition that heals, or an agent that was stopped and is continued, finds none of its workers able to write.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from torch.distributed.distributed_c10d import Store

from ntp_launcher.outcome import ExitCode

PATIENCE = 1.5  # leases that the coordinator waits for
_RENEWALS = 5  # in the time of a lease
_LONGEST_PAUSE_S = 0.5
_WATCH_S = 0.05
_STUCK_S = 5.0  # for the main thread to notice


@dataclass(frozen=True, slots=True)
class Pulse:
    """A renewal, and how the node's workers are.

    Attributes:
        count: of renewals.
        stopped: ranks whose process is stopped.
        cpu_s: processor seconds used so far, by rank.
    """

    count: int = 0
    stopped: list[int] = field(default_factory=list[int])
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])

    def to_json(self) -> str:
        """What the lease's key holds; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Pulse":
        """What `to_json` wrote."""
        return cls(**json.loads(text))


class Lease:
    """Renews from construction to `close`.

    Args:
        store: a connection of its own.
        seconds: until the lease runs out; infinite where one agent is all there is.
        look: says how the workers are.
        fence: kills them; called in another thread.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        seconds: float,
        look: Callable[[int], Pulse],
        fence: Callable[[], None],
    ) -> None:
        self.is_lost = False
        self._store, self._key, self.seconds = store, key, seconds
        self._look, self._fence = look, fence
        self._renewed = time.monotonic()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._renew, self._watch)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops renewing; the workers are no longer this lease's business."""
        self._closed.set()

    def _renew(self) -> None:
        count = 0
        pause = min(self.seconds / _RENEWALS, _LONGEST_PAUSE_S)
        while not self._closed.is_set() and not self._has_run_out():
            begun = time.monotonic()
            try:
                self._store.set(self._key, self._look(count).to_json())
            except RuntimeError:  # the main thread meets the same and says so
                return
            self._renewed = begun
            count += 1
            self._closed.wait(pause)

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            if self._has_run_out():
                self._fence()
                self.is_lost = True
                if not self._closed.wait(_STUCK_S):
                    sys.stderr.write("ntp-launch: the control store is out of reach\n")
                    sys.stderr.flush()
                    os._exit(ExitCode.LOST_STORE)
                return

    def _has_run_out(self) -> bool:
        return time.monotonic() - self._renewed > self.seconds
