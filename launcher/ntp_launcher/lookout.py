"""Who gives no sign of life: workers by their beats, agents by their leases. It only looks.

Ages are measured by this process's own clock, from the moment at which it saw a value change. If this process
has itself been stopped for a while, everyone gets a fresh allowance.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store

from ntp.elastic_config import ElasticConfig
from ntp.protocol import Beat, Phase, beat_key
from ntp_launcher.coordinator import RUNNING, Rank, State, Status
from ntp_launcher.events import AgentLost, Event, TouchLost, WorkerHung, WorkerReady
from ntp_launcher.hangs import Sight, culprits
from ntp_launcher.lease import PATIENCE, Pulse
from ntp_launcher.mail import Post, lease_key, peek

_LOOK_S = 0.1
_APART_S = 2.0  # in which the death that made the members leave would be heard of
_OWN_GAP_S = 2.0  # between two looks: this process was not running


@dataclass(slots=True)
class _Seen:
    """The last value of a key, when it was seen to change, and the processor time of its writer then."""

    text: str | None
    since: float
    cpu_s: float = 0.0
    post: Post | None = None
    incarnation: int = 0


@dataclass(slots=True)
class Lookout:
    """The eyes of the leader, whose own node is `leader`."""

    store: Store
    limits: ElasticConfig
    homes: Mapping[int, int]
    leader: int
    _beats: dict[int, _Seen] = field(default_factory=dict[int, _Seen])
    _leases: dict[int, _Seen] = field(default_factory=dict[int, _Seen])
    _looked_at: float = 0.0

    def look(self, state: State) -> list[Event]:
        """What has become of workers and agents since the last look."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return []
        if now - self._looked_at > _OWN_GAP_S:
            self._forgive(now)
        self._looked_at = now
        lost = self._lost_agents(state, now)
        pulses = {node: Pulse.from_json(seen.text) for node, seen in self._leases.items() if seen.text}
        sights = self._sights(state, pulses, now)
        hung: list[WorkerHung] = []
        if self._hears_every_agent(now):  # else workers may be waiting for those of a node that has gone
            suspects = (sight for sight in sights if not state.ranks[sight.rank].doomed)
            hung = [
                WorkerHung(sight.rank, sight.incarnation, sight.doing(), sight.silent_s)
                for sight in culprits(suspects, self.limits)
            ]
        if hung:
            self._forgive(now)
        ready = [
            WorkerReady(sight.rank, sight.incarnation)
            for sight in sights
            if state.ranks[sight.rank].status is Status.STARTING and sight.phase is Phase.WAITING
        ]
        members = [sight for sight in sights if state.ranks[sight.rank].status is Status.MEMBER]
        return [*lost, *hung, *ready, *_apart(members, state.generation.generation)]

    def forget(self, rank: int) -> None:
        """Clears the last beat of a rank whose next process is about to start."""
        self.store.delete_key(beat_key(rank))
        self._beats.pop(rank, None)

    def _forgive(self, now: float) -> None:
        for seen in (*self._beats.values(), *self._leases.values()):
            seen.since = now

    def _hears_every_agent(self, now: float) -> bool:
        others = (seen for node, seen in self._leases.items() if node != self.leader)
        return all(now - seen.since < self.limits.lease_s / 2 for seen in others)

    def _lost_agents(self, state: State, now: float) -> Iterable[Event]:
        lost: list[Event] = []
        self._leases = {node: seen for node, seen in self._leases.items() if node in state.sessions}
        for node, session in state.sessions.items():
            post = Post(node, session)
            text = peek(self.store, lease_key(post))
            seen = self._leases.get(node)
            if seen is None or seen.post != post or seen.text != text:
                self._leases[node] = _Seen(text, now, post=post)
            elif node != self.leader and now - seen.since > PATIENCE * self.limits.lease_s:
                silent_s = now - seen.since
                reason = f"no sign of life from its agent for {silent_s:.1f} s"
                lost.append(AgentLost(node, session, reason, silent_s))
        return lost

    def _sights(self, state: State, pulses: Mapping[int, Pulse], now: float) -> list[Sight]:
        running = {rank: seen for rank, seen in state.ranks.items() if seen.status in RUNNING}
        return [self._sight(rank, seen, pulses.get(self.homes[rank]), now) for rank, seen in running.items()]

    def _sight(self, rank: int, standing: Rank, pulse: Pulse | None, now: float) -> Sight:
        text = peek(self.store, beat_key(rank))
        cpu_s = pulse.cpu_s.get(str(rank), 0.0) if pulse else 0.0
        seen = self._beats.get(rank)
        if seen is None or seen.text != text or seen.incarnation != standing.incarnation:
            seen = self._beats[rank] = _Seen(text, now, cpu_s, incarnation=standing.incarnation)
        return Sight(
            rank,
            standing.incarnation,
            None if text is None else Beat.from_json(text),
            now - seen.since,
            pulse is not None and rank in pulse.stopped,
            cpu_s - seen.cpu_s,
        )


def _apart(members: Sequence[Sight], generation: int) -> list[TouchLost]:
    """Whether all members have been in a generation, and have been waiting for the next one for a while."""
    left = [
        sight.silent_s
        for sight in members
        if sight.beat is not None and sight.beat.generation == generation and sight.phase is Phase.WAITING
    ]
    gone = len(left) == len(members) > 0 and min(left) > _APART_S
    return [TouchLost(generation, min(left))] if gone else []
