"""The coordinator: what it decides, for single stories and for any order of events."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ntp_launcher.coordinator import (
    FINISH_S,
    GATHER_S,
    KILL_S,
    RUNNING,
    SETTLE_S,
    Rules,
    State,
    Status,
    begin,
    react,
)
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
    from_json,
    to_json,
)

from ntp.config import Config, load_config

TINY = Path(__file__).parent.parent / "configs" / "tiny-cpu.yaml"
MOST = 3
HOMES = {rank: rank // 4 for rank in range(9)} | {8: 1}
LATER = 1e6


def config(*overrides: str) -> Config:
    most = f"elastic.max_recoveries_without_progress={MOST}"
    return load_config(TINY, ["parallel.standbys=1", most, *overrides])


RULES = Rules(config(), HOMES)


@dataclass
class Job:
    """A story: events go in, actions come out."""

    state: State
    rules: Rules = RULES
    now: float = 1000.0

    def hears(self, *events: Event, after: float = 0.0) -> tuple[Action, ...]:
        self.now += after
        self.state, actions = react(self.rules, self.state, events, self.now)
        return actions

    def commits(self, step: int = 1) -> tuple[Action, ...]:
        return self.hears(StepCommitted(step, self.state.generation.generation))

    def status(self, rank: int) -> Status:
        return self.state.ranks[rank].status


def job(*overrides: str, failed: tuple[int, ...] = ()) -> Job:
    rules = Rules(config(*overrides), HOMES)
    return Job(begin(rules, failed), rules)


def opened(actions: tuple[Action, ...]) -> tuple[int, list[int], bool]:
    (action,) = actions
    assert isinstance(action, Open)
    return action.generation.generation, action.generation.failed, action.generation.at_boundary


def ended(actions: tuple[Action, ...]) -> tuple[int, str]:
    (action,) = actions
    assert isinstance(action, End)
    return action.code, action.reason


def killed(rank: int, incarnation: int = 0) -> WorkerExited:
    return WorkerExited(rank, incarnation, -9)


def crashed(rank: int, incarnation: int = 0) -> WorkerExited:
    return WorkerExited(rank, incarnation, 1, "ValueError: no")


def test_a_loss_opens_a_generation_and_is_heard_of_once() -> None:
    story = job(failed=(7,))
    (action,) = story.hears(killed(3))
    assert isinstance(action, Open)
    assert opened((action,)) == (1, [3, 7], False)
    assert action.generation.cause == "rank 3 was killed by SIGKILL"
    assert story.hears(killed(3), killed(3)) == ()


def test_losses_of_one_turn_share_a_generation_and_a_second_one_opens_another() -> None:
    story = job()
    (action,) = story.hears(WorkerExited(2, 0, 1, "Connection closed by peer"), killed(3))
    assert isinstance(action, Open)
    assert action.generation.failed == [2, 3]
    assert action.generation.cause == "rank 3 was killed by SIGKILL (2 ranks lost)"
    assert opened(story.hears(killed(0))) == (2, [0, 2, 3], False)


def test_an_early_exit_with_code_0_is_a_loss_and_after_the_end_of_the_run_is_not() -> None:
    story = job()
    assert opened(story.hears(WorkerExited(1, 0, 0))) == (1, [1], False)
    assert story.hears(Finished()) == ()
    assert story.hears(killed(2), WorkerExited(3, 0, 0)) == ()
    assert ended(story.hears(after=FINISH_S)) == (0, "")


def test_the_job_is_done_when_the_run_is_complete_and_every_process_gone() -> None:
    story = job()
    story.hears(Finished())
    assert story.hears(*(WorkerExited(rank, 0, 0) for rank in range(8))) == ()
    assert ended(story.hears(WorkerExited(8, 0, 0))) == (0, "")
    assert story.hears(killed(0), Finished()) == ()


def test_nothing_left_is_the_programs_own_failure_or_an_unrecoverable_loss() -> None:
    assert ended(job().hears(*map(crashed, range(9)))) == (1, "rank 0 exited with code 1: ValueError: no")
    assert ended(job().hears(*(WorkerExited(rank, 0, 0) for rank in range(9))))[0] == 1
    code, reason = ended(job().hears(*map(killed, range(9))))
    assert code == 3
    assert reason.startswith("rank 0 was killed by SIGKILL (9 ranks lost); no replica is left")
    assert ended(job("parallel.min_degree=4").hears(killed(0), killed(4), killed(8)))[0] == 3


def test_a_refused_start_is_the_end_and_no_loss_whatever_else_is_heard_of() -> None:
    for events in ([Refused("no"), crashed(0)], [crashed(0), crashed(1), Refused("no"), Finished()]):
        run = job()
        assert ended(run.hears(*events)) == (2, "no")
        assert run.hears(crashed(2), after=LATER) == ()
        assert run.state.exits == ()


def test_losses_without_a_committed_step_between_them_end_the_job() -> None:
    story = job()
    for rank in range(MOST):
        opened(story.hears(killed(rank)))
    code, reason = ended(story.hears(killed(6)))
    assert code == 4
    assert "3 recoveries without a committed step" in reason
    story = job()
    for rank in range(6):
        opened(story.hears(killed(rank)))
        story.commits(rank)


def test_members_that_have_lost_touch_get_another_generation_but_not_for_ever() -> None:
    story = job()
    assert story.hears(TouchLost(5)) == ()
    assert opened(story.hears(TouchLost(0))) == (1, [], False)
    assert story.hears(TouchLost(0)) == ()
    assert opened(story.hears(TouchLost(1), killed(3))) == (2, [3], False)
    for generation in range(3, MOST + 1):
        assert opened(story.hears(TouchLost(generation - 1)))[0] == generation
    assert ended(story.hears(TouchLost(MOST)))[0] == 4


def test_a_hung_worker_is_lost_when_it_is_dead_and_not_before() -> None:
    story = job()
    hang = WorkerHung(5, 0, "step 7, phase exchange", 12.0)
    assert story.hears(hang) == (Kill(5, 0),)
    assert story.hears(hang) == ()
    (action,) = story.hears(killed(5))
    assert isinstance(action, Open)
    assert action.generation.cause == "rank 5 hung in step 7, phase exchange (12.0 s without a sign of life)"
    story = job()
    story.hears(hang)
    assert story.hears(after=KILL_S / 2) == ()
    assert opened(story.hears(after=KILL_S / 2)) == (1, [5], False)
    assert story.status(5) is Status.OUT


def test_a_dead_rank_is_probed_started_and_taken_in_at_a_boundary() -> None:
    story = job()
    story.hears(killed(3))
    assert story.hears(after=LATER) == ()  # nobody returns into an unfinished recovery
    assert story.commits() == (Probe(3, 0),)
    assert story.hears(ProbeDone(3, 0, True)) == (Start(3, 1),)
    assert story.hears(ProbeDone(3, 0, True), killed(3)) == ()  # late news of the old process
    assert opened(story.hears(WorkerReady(3, 1))) == (2, [], True)
    assert opened(story.hears(killed(3, 1))) == (3, [3], False)


def test_nobody_joins_before_a_step_is_committed_in_the_current_generation() -> None:
    story = job()
    story.hears(killed(3))
    story.commits()
    story.hears(after=LATER)
    story.hears(ProbeDone(3, 0, True))
    assert opened(story.hears(WorkerReady(3, 1), killed(4))) == (2, [3, 4], False)
    assert story.hears(StepCommitted(2, 1)) == ()
    assert Open in {type(action) for action in story.commits(3)}
    assert story.state.generation.failed == [4]


def test_those_who_start_together_join_together_unless_one_takes_too_long() -> None:
    for late in (False, True):
        story = job("elastic.probe=null")
        story.hears(killed(3), killed(5))
        story.commits()
        assert len(story.hears(after=LATER)) == 2
        assert story.hears(WorkerReady(3, 1)) == ()
        if late:
            assert opened(story.hears(after=GATHER_S)) == (2, [5], True)
        else:
            assert opened(story.hears(WorkerReady(5, 1))) == (2, [], True)


def test_a_failed_probe_keeps_a_device_out_until_it_is_healed() -> None:
    story = job(failed=(8,))
    story.hears(killed(3))
    story.commits()
    assert story.hears(after=LATER) == (Probe(3, 0),)
    assert story.hears(ProbeDone(3, 0, False, "no")) == ()
    assert story.hears(after=LATER) == ()
    assert story.hears(HealRequested((3, 8, 0, 99))) == (Probe(3, 0), Probe(8, 0))
    assert story.hears(ProbeDone(8, 0, True)) == (Start(8, 1),)


def test_a_rank_that_keeps_failing_by_itself_stays_out_and_a_killed_one_comes_back() -> None:
    story = job("elastic.probe=null", "elastic.max_restarts_per_rank=2")
    for incarnation in range(3):
        story.hears(crashed(3, incarnation))
        story.commits()
        starts = story.hears(after=LATER)
        if incarnation < 2:
            assert starts == (Start(3, incarnation + 1),)
            story.hears(WorkerReady(3, incarnation + 1))
    assert starts == ()
    assert story.status(3) is Status.OUT
    for incarnation in range(5):
        story.hears(killed(4, incarnation))
        story.commits()
        assert story.hears(after=LATER) == (Start(4, incarnation + 1),)
        story.hears(WorkerReady(4, incarnation + 1))


def test_nobody_returns_where_that_is_not_wanted() -> None:
    story = job("elastic.rejoin=never")
    story.hears(killed(3))
    story.commits()
    assert story.hears(after=LATER) == ()
    assert story.hears(HealRequested((3,))) == (Probe(3, 0),)


def test_a_lost_agent_loses_its_ranks_and_comes_back_with_them() -> None:
    story = job(failed=(5,))
    assert opened(story.hears(AgentLost(1, 0, "gone"))) == (1, [4, 5, 6, 7, 8], False)
    assert story.state.generation.cause == "node 1 is lost: gone (4 ranks lost)"
    story.commits()
    assert story.hears(AgentLost(1, 0, "gone"), after=LATER) == ()
    assert story.hears(AgentJoined(1, 1)) == tuple(Probe(rank, 0) for rank in (4, 6, 7, 8))
    assert story.hears(AgentLost(1, 0, "gone"), killed(4)) == ()
    assert len(story.hears(*(ProbeDone(rank, 0, True) for rank in (4, 6, 7, 8)))) == 4
    assert opened(story.hears(*(WorkerReady(rank, 1) for rank in (4, 6, 7, 8)))) == (2, [5], True)


def test_an_agent_that_was_started_again_at_once_has_lost_its_old_workers() -> None:
    story = job()
    assert opened(story.hears(AgentJoined(1, 1))) == (1, [4, 5, 6, 7, 8], False)


def test_where_losses_are_not_survived_the_first_one_ends_the_job_with_its_cause() -> None:
    story = job("elastic.enabled=false")
    assert story.hears(WorkerExited(2, 0, 1, "Connection closed by peer")) == ()
    assert story.hears(killed(3), after=SETTLE_S / 2) == ()
    assert ended(story.hears(after=SETTLE_S / 2)) == (1, "rank 3 was killed by SIGKILL")
    assert ended(job("elastic.enabled=false").hears(*map(killed, range(9))))[0] == 1


ranks = st.integers(0, 8)
incarnations = st.integers(0, 2)
EVENTS = st.one_of(
    st.builds(
        WorkerExited,
        ranks,
        incarnations,
        st.sampled_from([-9, -11, 0, 1]),
        st.sampled_from(["", "ValueError", "Connection closed"]),
    ),
    st.builds(WorkerHung, ranks, incarnations, st.just("step"), st.just(1.0)),
    st.builds(WorkerReady, ranks, incarnations),
    st.builds(ProbeDone, ranks, incarnations, st.booleans()),
    st.builds(AgentJoined, st.integers(0, 1), incarnations),
    st.builds(AgentLost, st.integers(0, 1), incarnations, st.just("gone")),
    st.builds(HealRequested, st.tuples(ranks)),
    st.builds(StepCommitted, st.integers(0, 9), st.integers(0, 6)),
    st.builds(TouchLost, st.integers(0, 6)),
    st.builds(Finished),
)
HISTORIES = st.lists(
    st.tuples(st.lists(EVENTS, max_size=3), st.sampled_from([0.0, 1.0, KILL_S, LATER])), max_size=25
)


@settings(max_examples=300, deadline=None)
@given(HISTORIES)
def test_whatever_happens_the_rules_hold(history: list[tuple[list[Event], float]]) -> None:
    story = job()
    for events, pause in history:
        before = story.state
        actions = story.hears(*events, after=pause)
        assert story.hears(*(e for e in events if isinstance(e, (WorkerExited, WorkerHung)))) == ()
        check(before, story.state, actions)


def check(before: State, after: State, actions: tuple[Action, ...]) -> None:
    """What must hold of every turn."""
    generations = [action.generation for action in actions if isinstance(action, Open)]
    ends = [action for action in actions if isinstance(action, End)]
    assert len(generations) + len(ends) <= 1
    assert not (before.ended and actions)
    assert after.ended == (before.ended or bool(ends))
    for generation in generations:
        assert generation == after.generation
        assert generation.generation == before.generation.generation + 1
        assert generation.failed == sorted(set(HOMES) - set(after.members()))
        if generation.at_boundary:
            assert after.settled == before.generation.generation
            assert set(before.generation.failed) > set(generation.failed)
    if not (generations or ends or after.finished_at is not None):
        assert set(after.members()) == set(before.members())  # no death goes unanswered
    for rank, seen in after.ranks.items():
        old = before.ranks[rank]
        started = [a.incarnation for a in actions if isinstance(a, Start) and a.rank == rank]
        assert seen.incarnation == old.incarnation + len(started)
        assert len(started) <= 1
        if started:
            assert old.status not in RUNNING or after.ended
        if seen.status in RUNNING and not after.ended:
            assert HOMES[rank] in after.sessions
    for action in actions:
        if isinstance(action, Kill):
            assert before.ranks[action.rank].status in RUNNING


@settings(max_examples=100, deadline=None)
@given(st.permutations([killed(0), crashed(1), WorkerExited(5, 0, 0), AgentLost(1, 0, "gone"), killed(7)]))
def test_the_order_of_losses_in_a_turn_does_not_matter(events: list[Event]) -> None:
    assert opened(job().hears(*events)) == (1, [0, 1, 4, 5, 6, 7, 8], False)


@pytest.mark.parametrize(
    "message",
    [killed(3), ProbeDone(1, 2, False, "no"), AgentLost(1, 0, "left"), Start(1, 2), End(3, "over")],
)
def test_mail_reads_back_what_was_written(message: WorkerExited) -> None:
    assert from_json(to_json(message)) == message
