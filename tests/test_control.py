"""A worker's side of the control store, and what the launcher sees of it."""

from datetime import timedelta

import pytest
from ntp_launcher import lookout
from ntp_launcher.coordinator import Rules, begin
from ntp_launcher.events import TouchLost
from ntp_launcher.lookout import Lookout
from torch.distributed import HashStore

from ntp.control import Control
from ntp.elastic_config import ElasticConfig
from ntp.protocol import FINISHED, GENERATION, Beat, Generation, Phase, beat_key
from tests.shapes import make_config


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set(GENERATION, Generation(0, []).to_json())
    return store


def test_whoever_comes_when_the_others_have_finished_is_let_go(store: HashStore) -> None:
    control = Control(lambda: store, 1)
    assert control.next_generation(has_worked=False, timeout_s=5.0) == Generation(0, [])
    store.set(FINISHED, "{}")
    assert not control.arrive(2)
    control.close()


def test_a_worker_that_has_lost_a_peer_outwaits_another_that_hangs() -> None:
    limits = ElasticConfig()
    assert limits.patience_s > max(limits.step_timeout_s, limits.checkpoint_timeout_s)
    assert ElasticConfig(enabled=False).patience_s == 0.0


def test_members_that_all_wait_without_a_death_have_lost_touch(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "_LOOK_S", 0.0)
    monkeypatch.setattr(lookout, "_APART_S", 0.0)
    config = make_config(parallel={"dp": 2, "tp": 1})
    state = begin(Rules(config, {0: 0, 1: 0}), ())
    eyes = Lookout(store, config.elastic, {0: 0, 1: 0}, leader=0)

    def seen(*beats: Beat) -> list[object]:
        for rank, beat in enumerate(beats):
            store.set(beat_key(rank), beat.to_json())
        eyes.look(state)
        return list(eyes.look(state))

    new, left = Beat(-1, 0, Phase.WAITING, 1), Beat(0, 3, Phase.WAITING, 9)
    assert seen(new, new) == []
    assert seen(left, Beat(0, 3, Phase.STEP, 8)) == []
    (apart,) = seen(left, left)
    assert isinstance(apart, TouchLost)
    assert apart.generation == 0
