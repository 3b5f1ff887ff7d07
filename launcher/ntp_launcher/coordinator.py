"""What becomes of a job when something happens to it: (state, events) -> (state, actions). Pure.

Events may come in any order, twice, late, or in the middle of a recovery. What always holds:

- A generation excludes exactly the ranks that are not members; its number counts up by one.
- The death of a member is answered in the same turn: by a generation without it, or by the end of the job.
  Deaths that are heard of in one turn share a generation.
- Members that have left a generation though none has died get another one, all of them.
- News of a process that has been replaced, or of a death that is known, changes nothing.
- Somebody joins only at a step boundary, and only once a step has been committed in the current generation:
  members on their way into it would otherwise wait for a boundary that the dead cannot reach.
- Once the run is complete, no death matters.
- Where losses are not survived (`elastic.enabled: false`), the first one ends the job, after a moment in
  which the others' ends come in, so that the cause can be told from its consequences.

What an event means for one rank is in the `_on_` functions, what follows for the job in `_conclude`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ntp.config import Config
from ntp.errors import PlanError
from ntp.plan import make_plan
from ntp.protocol import Generation
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
    StepCommitted,
    TouchLost,
    WorkerExited,
    WorkerHung,
    WorkerReady,
)
from ntp_launcher.outcome import (
    Exit,
    ExitCode,
    Kind,
    describe,
    explain,
    first_cause,
    kind_of,
    why_none_is_left,
)

KILL_S = 10.0  # a killed process is gone within milliseconds, or waits inside a driver for ever
FINISH_S = 20.0  # for processes to end after the run is complete
GATHER_S = 5.0  # for those who start at the same time, so that they join together
SETTLE_S = 1.0  # consequences of a failure arrive within tens of milliseconds
_LONGEST_PAUSE = 6  # doublings


class Status(StrEnum):
    """Where a rank stands."""

    MEMBER = "member"  # its process belongs to the newest generation
    STARTING = "starting"  # its process is not ready yet
    READY = "ready"  # its process waits to be taken in
    DEAD = "dead"  # no process; there will be another
    PROBING = "probing"  # the same, its device is being looked at
    OUT = "out"  # no process until a user says that the device is well
    AWAY = "away"  # its node has no agent


RUNNING = (Status.MEMBER, Status.STARTING, Status.READY)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank and its newest process.

    Attributes:
        incarnation: of that process.
        strikes: ends that count against it: errors of its own, or a death before it was a member.
        due: when a dead one is to be started, a doomed one given up, a ready one let in.
        doomed: why its process is being killed, "" if it is not.
    """

    status: Status
    incarnation: int = 0
    strikes: int = 0
    due: float = 0.0
    doomed: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """What does not change during a job: its configuration, and the node of every rank."""

    config: Config
    homes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows.

    Attributes:
        sessions: of the agents that are there, by node.
        settled: the newest generation in which a step has been committed.
        fruitless: losses answered since the last committed step.
        exits: members lost since then.
        notes: causes of those losses that say more than an exit does.
        finished_at: when the run was complete.
        judged_at: when a job that does not survive losses is to end.
    """

    generation: Generation
    ranks: Mapping[int, Rank]
    sessions: Mapping[int, int]
    settled: int = -1
    fruitless: int = 0
    exits: tuple[Exit, ...] = ()
    notes: tuple[str, ...] = ()
    finished_at: float | None = None
    judged_at: float | None = None
    ended: bool = False

    def members(self) -> list[int]:
        """Ranks of the newest generation."""
        return [rank for rank, seen in self.ranks.items() if seen.status is Status.MEMBER]


def begin(rules: Rules, failed: Iterable[int]) -> State:
    """The state of a job whose agents are there and have started every rank but the failed ones."""
    out = sorted(set(failed))
    ranks = {rank: Rank(Status.OUT if rank in out else Status.MEMBER) for rank in sorted(rules.homes)}
    return State(Generation(0, out, cause="start"), ranks, dict.fromkeys(rules.homes.values(), 0))


def react(
    rules: Rules, state: State, events: Sequence[Event], now: float
) -> tuple[State, tuple[Action, ...]]:
    """The state after some events (none: time has passed) and what is to be done, in this order.

    Args:
        now: seconds since the epoch; may jump, decides nothing but pauses and patience.
    """
    turn = _Turn(rules, state, now, dict(state.ranks))
    for event in events:
        if not turn.state.ended:
            _apply(turn, event)
    if not turn.state.ended:
        _give_up_on_the_undead(turn)
        _conclude(turn)
    return replace(turn.state, ranks=turn.ranks), tuple(turn.actions)


@dataclass(slots=True)
class _Turn:
    """A reaction in the making.

    Attributes:
        lost: members that have died in this turn, with what is known of their end.
        notes: causes that say more than an exit does.
        is_apart: the members have lost touch with each other.
    """

    rules: Rules
    state: State
    now: float
    ranks: dict[int, Rank]
    actions: list[Action] = field(default_factory=list[Action])
    lost: list[Exit] = field(default_factory=list[Exit])
    notes: list[str] = field(default_factory=list[str])
    is_apart: bool = False

    def running(self, rank: int, incarnation: int) -> Rank | None:
        """The rank, if this very process of it is running as far as we know."""
        seen = self.ranks.get(rank)
        return seen if seen and seen.incarnation == incarnation and seen.status in RUNNING else None

    def is_settled(self) -> bool:
        """Whether a step has been committed in the current generation."""
        return self.state.settled == self.state.generation.generation


def _apply(turn: _Turn, event: Event) -> None:
    match event:
        case WorkerExited():
            _on_exit(turn, event)
        case WorkerHung():
            _on_hang(turn, event)
        case WorkerReady(rank, incarnation):
            seen = turn.running(rank, incarnation)
            if seen and seen.status is Status.STARTING and not seen.doomed:
                turn.ranks[rank] = replace(seen, status=Status.READY, due=turn.now + GATHER_S)
        case TouchLost(generation, _):
            turn.is_apart |= generation == turn.state.generation.generation
        case ProbeDone():
            _on_probe(turn, event)
        case AgentJoined(node, session):
            _on_agent_joined(turn, node, session)
        case AgentLost(node, session, reason, _):
            if turn.state.sessions.get(node) == session:
                _lose_node(turn, node, reason)
        case HealRequested(ranks):
            _on_heal(turn, ranks)
        case StepCommitted(_, generation):
            settled = max(turn.state.settled, min(generation, turn.state.generation.generation))
            turn.state = replace(turn.state, settled=settled, fruitless=0, exits=(), notes=())
        case Refused(reason):
            _end(turn, ExitCode.BAD_INPUT, reason)
        case Finished():
            if turn.state.finished_at is None:
                turn.state = replace(turn.state, finished_at=turn.now)


def _on_exit(turn: _Turn, event: WorkerExited) -> None:
    seen = turn.running(event.rank, event.incarnation)
    if seen is None:
        return
    exit = Exit(event.rank, event.code, event.error, order=len(turn.lost))
    member = seen.status is Status.MEMBER
    if member:
        turn.lost.append(exit)
        turn.notes += [seen.doomed] if seen.doomed else []
    own_fault = not member or (not seen.doomed and kind_of(exit) in (Kind.ERROR, Kind.EARLY_SUCCESS))
    elastic = turn.rules.config.elastic
    strikes = seen.strikes + own_fault
    returns = elastic.rejoin == "auto" and strikes <= elastic.max_restarts_per_rank
    pause = elastic.rejoin_after_s * 2 ** min(strikes, _LONGEST_PAUSE)
    turn.ranks[event.rank] = Rank(
        Status.DEAD if returns else Status.OUT, seen.incarnation, strikes, turn.now + pause
    )


def _on_hang(turn: _Turn, event: WorkerHung) -> None:
    """Has it killed; it is lost when it is dead, because until then it might wake up and write."""
    seen = turn.running(event.rank, event.incarnation)
    if seen is None or seen.doomed or turn.state.finished_at is not None:
        return
    reason = f"rank {event.rank} hung in {event.doing} ({event.silent_s:.1f} s without a sign of life)"
    turn.ranks[event.rank] = replace(seen, doomed=reason, due=turn.now + KILL_S)
    turn.actions.append(Kill(event.rank, event.incarnation))


def _on_probe(turn: _Turn, event: ProbeDone) -> None:
    seen = turn.ranks.get(event.rank)
    if seen is None or seen.status is not Status.PROBING or seen.incarnation != event.incarnation:
        return
    if event.passed:
        _start(turn, event.rank, seen)
    else:
        turn.ranks[event.rank] = replace(seen, status=Status.OUT)


def _start(turn: _Turn, rank: int, seen: Rank) -> None:
    turn.ranks[rank] = replace(seen, status=Status.STARTING, incarnation=seen.incarnation + 1)
    turn.actions.append(Start(rank, seen.incarnation + 1))


def _on_agent_joined(turn: _Turn, node: int, session: int) -> None:
    current = turn.state.sessions.get(node)
    if current is not None and current >= session:
        return
    if current is not None:
        _lose_node(turn, node, "its agent was started again")
    turn.state = replace(turn.state, sessions={**turn.state.sessions, node: session})
    for rank, seen in turn.ranks.items():
        if seen.status is Status.AWAY:
            back = turn.rules.homes[rank] == node
            turn.ranks[rank] = replace(seen, status=Status.DEAD, due=turn.now) if back else seen


def _lose_node(turn: _Turn, node: int, reason: str) -> None:
    sessions = {other: session for other, session in turn.state.sessions.items() if other != node}
    turn.state = replace(turn.state, sessions=sessions)
    before = len(turn.lost)
    for rank, seen in turn.ranks.items():
        if turn.rules.homes[rank] == node and seen.status is not Status.OUT:
            if seen.status is Status.MEMBER:
                turn.lost.append(Exit(rank, -9, order=len(turn.lost)))
            turn.ranks[rank] = Rank(Status.AWAY, seen.incarnation, seen.strikes)
    if len(turn.lost) > before:
        turn.notes.append(f"node {node} is lost: {reason}")


def _on_heal(turn: _Turn, ranks: Sequence[int]) -> None:
    for rank in ranks:
        seen = turn.ranks.get(rank)
        if seen and seen.status in (Status.OUT, Status.DEAD):
            present = turn.rules.homes[rank] in turn.state.sessions
            status = Status.DEAD if present else Status.AWAY
            turn.ranks[rank] = Rank(status, seen.incarnation, due=turn.now)


def _give_up_on_the_undead(turn: _Turn) -> None:
    """A process that not even SIGKILL ends is lost; its generation number keeps it from doing harm."""
    for rank, seen in turn.ranks.items():
        if seen.status in RUNNING and seen.doomed and turn.now >= seen.due:
            if seen.status is Status.MEMBER:
                turn.lost.append(Exit(rank, -9, order=len(turn.lost)))
                turn.notes.append(f"{seen.doomed} and cannot be killed")
            turn.ranks[rank] = Rank(Status.OUT, seen.incarnation, seen.strikes)


def _conclude(turn: _Turn) -> None:
    """What the events of a turn mean for the job."""
    if turn.state.finished_at is not None:
        running = any(seen.status in RUNNING for seen in turn.ranks.values())
        if not running or turn.now >= turn.state.finished_at + FINISH_S:
            _end(turn, ExitCode.DONE, "")
        return
    exits, notes = (*turn.state.exits, *turn.lost), (*turn.state.notes, *turn.notes)
    turn.state = replace(turn.state, exits=exits, notes=notes)
    if not turn.rules.config.elastic.enabled:
        _judge(turn)
    elif turn.lost or turn.is_apart:
        _go_on(turn)
    elif turn.is_settled():
        _take_in(turn)
        _bring_back(turn)


def _judge(turn: _Turn) -> None:
    """Ends a job that does not survive losses, as soon as the picture is whole."""
    state = turn.state
    if state.exits and state.judged_at is None:
        turn.state = state = replace(state, judged_at=turn.now + SETTLE_S)
    if state.judged_at is not None and (turn.now >= state.judged_at or len(_absent(turn)) == len(turn.ranks)):
        _end(turn, ExitCode.FAILED, explain(state.exits, state.notes) or describe(state.exits[0]))


def _go_on(turn: _Turn) -> None:
    """Opens a generation of the members that are left."""
    turn.state = replace(turn.state, fruitless=turn.state.fruitless + 1)
    cause, failed = _cause(turn), _absent(turn)
    most = turn.rules.config.elastic.max_recoveries_without_progress
    try:
        make_plan(turn.rules.config, failed)
    except PlanError as error:
        _end(turn, *why_none_is_left(turn.state.exits, turn.state.notes, f"{cause}; {error}"))
        return
    if turn.state.fruitless > most:
        _end(turn, ExitCode.NO_PROGRESS, f"{most} recoveries without a committed step; then {cause}")
        return
    _open(turn, failed, cause, at_boundary=False)


def _cause(turn: _Turn) -> str:
    """Why members were lost in this turn, in one line: the first cause, and how many more there are."""
    if not turn.lost:
        return "the members lost touch with each other"
    cause = turn.notes[0] if turn.notes else describe(first_cause(turn.lost) or turn.lost[0])
    return f"{cause} ({len(turn.lost)} ranks lost)" if len(turn.lost) > 1 else cause


def _take_in(turn: _Turn) -> None:
    """Lets in whoever is ready, at best together with those who will soon be."""
    ready = [rank for rank, seen in turn.ranks.items() if seen.status is Status.READY]
    starting = any(seen.status is Status.STARTING for seen in turn.ranks.values())
    if starting and all(turn.now < turn.ranks[rank].due for rank in ready):
        return
    for rank in ready:
        turn.ranks[rank] = replace(turn.ranks[rank], status=Status.MEMBER)
    if ready:
        names = ", ".join(str(rank) for rank in ready)
        _open(turn, _absent(turn), f"rank{'s' * (len(ready) > 1)} {names} joined", at_boundary=True)


def _bring_back(turn: _Turn) -> None:
    """Has the devices of dead ranks looked at, and new processes started where nobody wants a look."""
    probe = turn.rules.config.elastic.probe
    for rank, seen in turn.ranks.items():
        if seen.status is Status.DEAD and turn.now >= seen.due:
            if probe is None:
                _start(turn, rank, seen)
            else:
                turn.ranks[rank] = replace(seen, status=Status.PROBING)
                turn.actions.append(Probe(rank, seen.incarnation))


def _absent(turn: _Turn) -> list[int]:
    return [rank for rank, seen in sorted(turn.ranks.items()) if seen.status is not Status.MEMBER]


def _open(turn: _Turn, failed: list[int], cause: str, at_boundary: bool) -> None:
    number = turn.state.generation.generation + 1
    generation = Generation(number, failed, at_boundary, cause, turn.now)
    turn.state = replace(turn.state, generation=generation)
    turn.actions.append(Open(generation))


def _end(turn: _Turn, code: ExitCode, reason: str) -> None:
    turn.state = replace(turn.state, ended=True)
    turn.actions.append(End(int(code), reason))
