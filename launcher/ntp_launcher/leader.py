"""The agent that leads: gathers what has happened, asks the coordinator, has it done.

It talks to the agents, its own node's included, by letters through the control store, and to the workers by
the keys of `ntp.protocol`. All that it knows of the job's fate is the coordinator's state.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from ntp.protocol import FINISHED, GENERATION, REFUSED, Generation, failure_key
from ntp_launcher.audience import Audience
from ntp_launcher.coordinator import Rules, State, Status, begin, react
from ntp_launcher.events import (
    Action,
    AgentJoined,
    AgentLost,
    End,
    Event,
    Finished,
    HealRequested,
    Kill,
    Open,
    Probe,
    ProbeDone,
    Refused,
    Start,
    TouchLost,
    WorkerExited,
    WorkerHung,
)
from ntp_launcher.heal import take_requests
from ntp_launcher.job import Job
from ntp_launcher.late import Place
from ntp_launcher.ledger import Ledger
from ntp_launcher.lookout import Lookout
from ntp_launcher.mail import END, HELLOS, Inbox, Outbox, Post, dropped_key, left_key, peek, read_json, take
from ntp_launcher.outcome import ExitCode, first_cause

_REQUESTS_S = 0.5
_POLL_S = 0.05
_COMING = (Status.STARTING, Status.READY, Status.PROBING)


@dataclass(slots=True)
class _Agent:
    """An agent as the leader knows it."""

    post: Post
    inbox: Inbox
    outbox: Outbox


@dataclass(slots=True)
class _Hello:
    """A late agent that waits for a place: `node` is the one it wants, None = any."""

    number: int
    node: int | None


@dataclass(slots=True)
class _Tally:
    """How long ago a loss had happened when it was heard of; `silent` belongs to hung ranks."""

    detect_s: float = 0.0
    silent: dict[int, float] = field(default_factory=dict[int, float])


class Leader:
    """Leads one job from the start of its workers to its end.

    Args:
        node: the leader's own.
        homes: the node of every rank.
        resumes: the run goes on from a checkpoint.
        attempt: how often all workers have been restarted.
        audience: hears of everything.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        store: Store,
        node: int,
        homes: Mapping[int, int],
        resumes: bool,
        attempt: int,
        audience: Audience,
    ) -> None:
        self._job, self._run_dir, self._store, self._audience = job, run_dir, store, audience
        self._attempt = attempt
        self._rules = Rules(job.config, homes)
        self._state = begin(self._rules, job.plan.failed)
        self._ledger = Ledger(job, run_dir, store, resumes, audience)
        self._lookout = Lookout(store, job.config.elastic, homes, node)
        self._agents = {other: self._agent(other, 0) for other in sorted(set(homes.values()))}
        self._sessions = dict.fromkeys(self._agents, 0)
        self._hellos: list[_Hello] = []
        self._heard = 0
        self._requests_at = 0.0
        self._tally = _Tally()
        self._hosts: dict[int, str] = {}
        store.set(GENERATION, self._state.generation.to_json())
        audience.begin(self._state.generation)

    @property
    def generation(self) -> Generation:
        """The newest."""
        return self._state.generation

    def poll(self) -> None:
        """One look at everything, and what follows from it."""
        if self._state.ended:
            return
        events = self._gather()
        self._measure(events)
        before = self._state
        self._state, actions = react(self._rules, before, events, time.time())
        for action in actions:
            self._act(action)
        for node, session in before.sessions.items():
            if self._state.sessions.get(node) != session:
                self._store.set(dropped_key(Post(node, session)), "")
        self._tell(before, events)
        self._audience.coming(rank for rank, seen in self._state.ranks.items() if seen.status in _COMING)
        self._audience.look()

    def end(self, code: int, reason: str) -> None:
        """Ends the job for a reason of the leader's own."""
        if not self._state.ended:
            self._store.set(END, json.dumps(asdict(End(code, reason))))

    def farewell(self, timeout_s: float) -> None:
        """Waits until every agent has seen the end: the store may go with this process."""
        self._ledger.close()
        self._audience.close()
        keys = [left_key(self._agents[node].post) for node in self._state.sessions]
        deadline = time.monotonic() + timeout_s
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _agent(self, node: int, session: int) -> _Agent:
        post = Post(node, session)
        return _Agent(post, Inbox(self._store, "event", post), Outbox(self._store, "order", post))

    def _gather(self) -> list[Event]:
        events: list[Event] = []
        events += self._ledger.committed()
        if self._state.finished_at is None and self._store.check([FINISHED]):
            events.append(Finished())
        for node in self._state.sessions:
            for letter in self._agents[node].inbox.take():
                assert isinstance(letter, (WorkerExited, ProbeDone, AgentLost))
                events.append(self._with_reason(letter))
        # Looked for behind the letters: whoever refuses says so before it ends.
        if self._state.settled < 0 and (refusal := peek(self._store, REFUSED)) is not None:
            events.append(Refused(refusal))
        events += self._lookout.look(self._state)
        now = time.monotonic()
        if now - self._requests_at > _REQUESTS_S:
            self._requests_at = now
            ranks = take_requests(self._run_dir)
            events += [HealRequested(tuple(ranks))] if ranks else []
            self._listen()
        return [*events, *self._grant()]

    def _with_reason(self, letter: WorkerExited | ProbeDone | AgentLost) -> Event:
        """An exit of which no log tells, on a full disk, has the reason that the worker put in the store."""
        if isinstance(letter, WorkerExited) and letter.code > 0 and not letter.error:
            return replace(letter, error=take(self._store, failure_key(letter.rank)) or "")
        return letter

    def _listen(self) -> None:
        """Hears late agents that have come to the door."""
        while self._heard < self._store.add(HELLOS, 0):
            hello: dict[str, Any] | None = read_json(self._store, f"hello/{self._heard}")
            if hello is None:
                return
            if hello["job"] != self._job.fingerprint():
                reason = "this node was given another config or other failed ranks than the running job"
                self._store.set(f"welcome/{self._heard}", json.dumps({"refused": reason}))
            else:
                self._hellos.append(_Hello(self._heard, hello["node"]))
            take(self._store, f"hello/{self._heard}")
            self._heard += 1

    def _grant(self) -> list[Event]:
        """Gives the places of lost nodes to those who wait."""
        joined: list[Event] = []
        free = [node for node in self._agents if node not in self._state.sessions]
        for hello in list(self._hellos):
            node = hello.node if hello.node is not None else free[0] if free else None
            if node in free:
                free.remove(node)
                self._hellos.remove(hello)
                self._sessions[node] += 1
                session = self._sessions[node]
                self._agents[node] = self._agent(node, session)
                place = Place(node, session, str(self._run_dir), self._attempt)
                self._store.set(f"welcome/{hello.number}", json.dumps(asdict(place)))
                joined.append(AgentJoined(node, session))
        return joined

    def _measure(self, events: list[Event]) -> None:
        self._tally.detect_s = 0.0
        for event in events:
            match event:
                case WorkerHung():
                    self._tally.silent[event.rank] = event.silent_s
                case WorkerExited():
                    self._hosts[event.rank] = event.host
                    silent_s = self._tally.silent.pop(event.rank, event.noticed_s)
                    self._tally.detect_s = max(self._tally.detect_s, silent_s)
                case AgentLost() | TouchLost():
                    self._tally.detect_s = max(self._tally.detect_s, event.noticed_s)
                case _:
                    pass

    def _act(self, action: Action) -> None:
        match action:
            case Open(generation):
                self._store.set(GENERATION, generation.to_json())
                self._ledger.note(generation, self._tally.detect_s)
                members, total = len(self._state.members()), len(self._state.ranks)
                self._audience.opened(generation, members, total)
            case Kill() | Probe() | Start():
                if isinstance(action, Start):
                    self._lookout.forget(action.rank)
                self._agents[self._rules.homes[action.rank]].outbox.send(action)
            case End():
                if action.code == ExitCode.DONE and (unwritten := self._ledger.finish()):
                    action = End(ExitCode.FAILED, f"the run is complete, but {unwritten}")
                action = self._blame(action)
                self._audience.ended(action.code, action.reason)
                self._store.set(END, json.dumps(asdict(action)))

    def _blame(self, end: End) -> End:
        """The end with the rank whose log says more, and how many others went with it."""
        cause = first_cause(self._state.exits)
        if end.code == ExitCode.DONE or cause is None or self._state.notes:
            return end
        host = self._hosts.get(cause.rank, "")
        others = tuple(exit.rank for exit in self._state.exits if exit.rank != cause.rank)
        return replace(end, rank=cause.rank, host=host, others=others)

    def _tell(self, before: State, events: list[Event]) -> None:
        """Says which ranks will not come back by themselves."""
        if self._state.ended or self._job.config.elastic.rejoin == "never":
            return
        details = {event.rank: event.detail for event in events if isinstance(event, ProbeDone)}
        for rank, seen in self._state.ranks.items():
            if seen.status is Status.OUT and before.ranks[rank].status is not Status.OUT:
                detail = details.get(rank)
                why = f"its device failed the probe: {detail}" if detail else "it has failed too often"
                self._audience.warn(f"rank {rank} stays out ({why}) until `ntp-heal RUN_DIR --ranks {rank}`")
