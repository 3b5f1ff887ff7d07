"""Which worker hangs: from what each one last said it was doing, and for how long. Pure.

When one worker hangs, its peers soon wait for it in a collective and look the same. They are told apart by
what they wait for: the culprit is the one furthest behind. Where several are equally far, a stopped process
is the culprit, else the one whose use of its processor differs most from the others' (those that wait all
sleep, or all spin).
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ntp.elastic_config import ElasticConfig
from ntp.protocol import Beat, Phase

_ORDER = list(Phase)
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Sight:
    """What can be seen of a running worker.

    Attributes:
        beat: its last one; None before the first.
        silent_s: seconds since then, or since its start.
        stopped: it is not being scheduled (SIGSTOP).
        cpu_s: processor seconds that it has used since its last beat.
    """

    rank: int
    incarnation: int
    beat: Beat | None
    silent_s: float
    stopped: bool = False
    cpu_s: float = 0.0

    @property
    def phase(self) -> Phase:
        """What it does."""
        return Phase(self.beat.phase) if self.beat else Phase.STARTUP

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it has come: generation, step, phase."""
        beat = self.beat
        return (beat.generation, beat.step, _ORDER.index(self.phase)) if beat else (-1, -1, 0)

    def doing(self) -> str:
        """In words."""
        if self.phase in (Phase.STARTUP, Phase.WAITING) or self.beat is None:
            return f"phase {self.phase}"
        return f"step {self.beat.step}, phase {self.phase}"


def culprits(sights: Iterable[Sight], limits: ElasticConfig) -> list[Sight]:
    """Those to kill now: stopped or starting for too long, or the one that holds up the others."""
    busy = [sight for sight in sights if sight.phase is not Phase.WAITING or sight.stopped]
    late = [sight for sight in busy if sight.silent_s > limit(sight, limits)]
    alone = [sight for sight in late if sight.stopped or sight.phase is Phase.STARTUP]
    if alone or not late:
        return alone
    last = min(sight.place for sight in busy if sight.phase is not Phase.STARTUP)
    behind = [sight for sight in late if sight.place == last]
    return [_odd_one_out(behind)] if behind else []


def limit(sight: Sight, limits: ElasticConfig) -> float:
    """Seconds for which a worker may be silent. Waiting has no end, unless the process is stopped."""
    if sight.phase is Phase.STARTUP:
        return limits.startup_timeout_s
    if sight.phase in (Phase.CHECKPOINT, Phase.FINISHING):
        return limits.checkpoint_timeout_s
    return _NEVER if sight.phase is Phase.WAITING and not sight.stopped else limits.step_timeout_s


def _odd_one_out(sights: Sequence[Sight]) -> Sight:
    """The one whose processor time is furthest from the median; of two, the one that sleeps."""
    median = statistics.median(sight.cpu_s for sight in sights)
    return max(sights, key=lambda sight: (abs(sight.cpu_s - median), -sight.cpu_s))
