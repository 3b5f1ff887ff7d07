"""A stand-in for an elastic worker: speaks `ntp.protocol`, computes nothing, and fails as it is told.

STUB_<rank> holds faults, as in `kill@s5 stop@s9#1 raise@g2`: what happens, at which step (s) or arrival at
which generation (g), and to which incarnation (default: 0). STUB_STEPS steps take STUB_PACE seconds each; a
file `enough` in the run directory ends the run before.
Every process leaves its id in the file `pid<rank>.<incarnation>` of the run directory.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from ntp.protocol import (
    FINISHED,
    GENERATION,
    STARTED,
    Beat,
    Generation,
    Phase,
    RecoveryTimes,
    arrived_key,
    beat_key,
    metrics_key,
    recovery_key,
)
from tests.store_client import StoreClient

POLL_S = 0.005
SWITCH, ENOUGH = 1000, 10**6


class ChangedError(Exception):
    """The generation is over."""


class Stub:
    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.incarnation = int(os.environ["NTP_INCARNATION"])
        self.world = int(os.environ["WORLD_SIZE"])
        prefix = f"ntp/{os.environ['TORCHELASTIC_RUN_ID']}"
        self.store = StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix)
        self.last = int(os.environ.get("STUB_STEPS", "40"))
        self.pace = float(os.environ.get("STUB_PACE", "0.02"))
        self.generation = -1
        self.committed = 0
        self.beats = 0
        self.beat(Phase.STARTUP)

    def beat(self, phase: Phase, step: int = 0) -> None:
        self.beats += 1
        self.store.set(beat_key(self.rank), Beat(self.generation, step, phase, self.beats).to_json())

    def newest(self) -> Generation:
        text = self.store.get(GENERATION)
        assert text is not None
        return Generation.from_json(text)

    def live(self) -> None:
        has_worked = False
        while True:
            self.beat(Phase.WAITING, self.committed)
            while (newest := self.newest()).generation == self.generation or self.rank in newest.failed:
                if self.store.check(FINISHED):
                    return
                if has_worked and self.rank in newest.failed:
                    raise RuntimeError("fenced")
                time.sleep(POLL_S)
            self.generation, has_worked = newest.generation, True
            try:
                self.work(newest)
                return
            except ChangedError:
                pass

    def work(self, generation: Generation) -> None:
        members = [rank for rank in range(self.world) if rank not in generation.failed]
        reports = self.rank == members[0]
        self.fail("g", self.generation)
        self.store.set(f"at/{self.generation}/{self.rank}", str(self.committed))
        self.meet(arrived_key(self.generation), len(members), 1)
        self.committed = max(int(self.store.get(f"at/{self.generation}/{r}") or 0) for r in members)
        if reports:
            self.store.set(STARTED, "0")
            times = RecoveryTimes(self.generation, 0.01, 0.02, 0.03, 0.04, 5, 0, "peers")
            self.store.set(recovery_key(self.generation), times.to_json())
            if self.committed:  # whoever committed it may have gone before it was told
                self.store.set(metrics_key(self.committed), json.dumps(self.line(self.committed)))
        while self.committed < self.last:
            step = self.committed + 1
            self.beat(Phase.STEP, step)
            self.fail("s", step)
            time.sleep(self.pace)
            self.beat(Phase.EXCHANGE, step)
            wants = SWITCH * (self.newest().generation > self.generation)
            enough = ENOUGH * (Path(os.environ["NTP_RUN_DIR"]) / "enough").exists()
            total = self.meet(f"done/{self.generation}/{step}", len(members), 1 + wants + enough)
            self.committed = step
            if reports:
                self.store.set(metrics_key(step), json.dumps(self.line(step)))
            if total >= ENOUGH:
                break
            if total >= SWITCH:
                raise ChangedError
        self.beat(Phase.FINISHING, self.committed)
        if reports:
            self.store.set(FINISHED, json.dumps({"steps": self.committed, "members": members}))
        while not self.store.check(FINISHED):
            time.sleep(POLL_S)

    def meet(self, key: str, size: int, amount: int) -> int:
        """Waits for all members; raises ChangedError if that is in vain."""
        total = self.store.add(key, amount)
        while total % SWITCH < size:
            newest = self.newest()
            if newest.generation > self.generation and not newest.at_boundary:
                raise ChangedError
            time.sleep(POLL_S)
            total = self.store.add(key, 0)
        return total

    def line(self, step: int) -> dict[str, object]:
        return {
            "step": step,
            "loss": 1.0 / step,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens_per_s": 1.0,
            "step_time_s": self.pace,
            "generation": self.generation,
        }

    def fail(self, kind: str, number: int) -> None:
        for fault in os.environ.get(f"STUB_{self.rank}", "").split():
            what, _, where = fault.partition("@")
            place, _, incarnation = where.partition("#")
            if place == f"{kind}{number}" and int(incarnation or 0) == self.incarnation:
                end_as(what)


def end_as(what: str) -> None:
    if what == "exit":
        sys.exit(0)
    if what == "raise":
        raise ValueError("an error of its own")
    if what == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}[what])


def main() -> None:
    rank, incarnation = os.environ["RANK"], os.environ["NTP_INCARNATION"]
    (Path(os.environ["NTP_RUN_DIR"]) / f"pid{rank}.{incarnation}").write_text(str(os.getpid()))
    sys.stdout.write(f"hello from {rank}\n")
    sys.stdout.flush()
    Stub().live()


if __name__ == "__main__":
    main()
