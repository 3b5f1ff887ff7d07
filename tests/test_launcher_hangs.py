"""Who is taken for the culprit when several workers give no sign of life."""

from ntp_launcher.hangs import Sight, culprits

from ntp.elastic_config import ElasticConfig
from ntp.protocol import Beat, Phase

LIMITS = ElasticConfig(
    step_timeout_s=10.0, checkpoint_timeout_s=50.0, startup_timeout_s=100.0, agent_timeout_s=200.0
)


def sight(
    rank: int,
    phase: Phase | None,
    silent_s: float = 11.0,
    step: int = 7,
    generation: int = 0,
    stopped: bool = False,
    cpu_s: float = 0.0,
) -> Sight:
    beat = None if phase is None else Beat(generation, step, phase, 1)
    return Sight(rank, 0, beat, silent_s, stopped, cpu_s)


def ranks(*sights: Sight) -> list[int]:
    return [culprit.rank for culprit in culprits(sights, LIMITS)]


def test_nobody_is_a_culprit_in_time_and_every_phase_has_its_own() -> None:
    assert ranks(sight(0, Phase.STEP, 9.0), sight(1, Phase.CHECKPOINT, 49.0), sight(2, None, 99.0)) == []
    assert ranks(sight(0, Phase.STEP, 11.0)) == [0]
    assert ranks(sight(0, Phase.CHECKPOINT, 51.0)) == [0]
    assert ranks(sight(0, None, 101.0), sight(1, Phase.STARTUP, 101.0)) == [0, 1]
    assert ranks(sight(0, Phase.WAITING, 1e9)) == []


def test_the_culprit_is_the_one_furthest_behind() -> None:
    assert ranks(sight(0, Phase.EXCHANGE), sight(1, Phase.STEP), sight(2, Phase.VOTE)) == [1]
    assert ranks(sight(0, Phase.STEP, step=8), sight(1, Phase.UPDATE)) == [1]
    assert ranks(sight(0, Phase.MOVING, generation=1), sight(1, Phase.VOTE), sight(2, Phase.WAITING)) == [1]


def test_whoever_waits_for_a_slow_one_is_not_blamed() -> None:
    assert ranks(sight(0, Phase.EXCHANGE), sight(1, Phase.STEP, 3.0)) == []
    assert ranks(sight(0, Phase.STEP), sight(1, None, 3.0)) == [0]  # a newcomer holds up nobody


def test_a_stopped_process_is_the_culprit_among_equals_even_while_it_waits() -> None:
    assert ranks(*(sight(rank, Phase.STEP, stopped=rank == 2) for rank in range(4))) == [2]
    assert ranks(sight(0, Phase.WAITING, stopped=True), sight(1, Phase.WAITING)) == [0]
    assert ranks(sight(0, Phase.WAITING, 3.0, stopped=True)) == []


def test_among_equals_the_one_whose_processor_time_differs_is_the_culprit() -> None:
    assert ranks(*(sight(rank, Phase.STEP, cpu_s=10.0 * (rank != 1)) for rank in range(4))) == [1]
    assert ranks(*(sight(rank, Phase.STEP, cpu_s=10.0 * (rank == 1)) for rank in range(4))) == [1]
    assert ranks(sight(0, Phase.STEP, cpu_s=9.0), sight(1, Phase.STEP)) == [1]
