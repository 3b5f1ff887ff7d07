"""Every fault that the product must survive, through the real launcher, with the bits of an unfailed run.

Faults are data. Each run of `test_every_kind_in_every_place` takes a mesh of eight ranks apart, fault by
fault; over all turns every kind meets every place. The first turns are quick enough for every test run.
"""

import pytest

from ntp.faults import Fault
from ntp.testing.trial import Trial, reference, run_trial

VICTIMS = (0, 4, 1, 5, 2, 6, 3)  # of both replicas by turns, so that one loss needs no disk
KINDS = ("kill", "exception", "terminate", "exit", "segfault", "out_of_memory", "stop")
PARTS = (
    (0, "startup"),
    (1, "data"),
    (2, "forward"),
    (3, "backward"),
    (4, "optimizer"),
    (6, "writer"),
    (6, "finishing"),
)
PHASES = (
    (1, "moving"),  # in the recovery from the next
    (2, "exchange"),
    (3, "vote"),
    (4, "update"),
    (4, "checkpoint"),
    (5, "moving"),  # in the recovery from the next
    (6, "step"),
)
STAY_AWAY = {"elastic": {"rejoin": "never"}}
QUICK_TO_JUDGE = {
    "elastic": {"rejoin": "never", "step_timeout_s": 5.0, "checkpoint_timeout_s": 6.0},
    "train": {"timeout_s": 4.0},
}
ONE_COPY = {"checkpoint": {"every": 0}, "optimizer": {"copies": 1}, **STAY_AWAY}


def kills(step, phase, *ranks):
    return tuple(Fault.of("kill", rank, step, phase) for rank in ranks)


COMBINATIONS = {
    "two ranks of one replica, a NaN, all but one rank": Trial(
        2, 3, (*kills(1, "step", 0, 1), Fault.of("nan", 5, 3), *kills(5, "step", 2, 3, 4)), STAY_AWAY
    ),
    "a whole replica": Trial(2, 2, kills(3, "update", 2, 3)),
    "connections alone": Trial(2, 2, tuple(Fault.of("disconnect", rank, 1 + rank) for rank in range(4))),
    "one rank of each replica": Trial(2, 2, kills(5, "update", 0, 3)),
    "a rank in the recovery from the loss of another": Trial(
        2, 2, (*kills(3, "exchange", 3), *kills(2, "moving", 1))
    ),
    "all but one rank before the first save": Trial(2, 2, kills(2, "step", 0, 1, 3)),
    "a standby takes over": Trial(2, 2, kills(3, "vote", 0), {"parallel": {"standbys": 1}}),
}
QUICK = 3


@pytest.fixture(scope="module")
def unfailed():
    return reference()


def turn_of(places, turn):
    """A run with a fault in each of these places; which kind is where depends on the turn."""
    kinds = KINDS[turn:] + KINDS[:turn]
    struck = zip(kinds, VICTIMS, places, strict=True)
    faults = [Fault.of(kind, rank, *place) for kind, rank, place in struck]
    marks = [pytest.mark.slow] if turn else []
    return pytest.param(Trial(2, 4, tuple(faults), QUICK_TO_JUDGE), id=f"{places[1][1]}-{turn}", marks=marks)


TURNS = [turn_of(places, turn) for places in (PARTS, PHASES) for turn in range(len(KINDS))]


@pytest.mark.parametrize("trial", TURNS)
def test_every_kind_in_every_place(tmp_path, unfailed, trial):
    outcome = run_trial(trial, tmp_path / "trial", unfailed)
    assert outcome.problem == ""
    assert outcome.struck == len(trial.faults)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if place >= QUICK else [])
        for place, name in enumerate(COMBINATIONS)
    ],
)
def test_several_losses_together(tmp_path, unfailed, name):
    outcome = run_trial(COMBINATIONS[name], tmp_path / "trial", unfailed)
    assert outcome.problem == ""
    assert outcome.struck == len(COMBINATIONS[name].faults)


def test_state_that_was_never_to_be_saved_is_lost_with_a_code_of_its_own(tmp_path, unfailed):
    outcome = run_trial(Trial(2, 2, kills(2, "step", 3), ONE_COPY), tmp_path / "trial", unfailed)
    assert outcome.problem.startswith("exit code 3: ")
    assert "no live rank has the state of" in outcome.problem
