"""Which GPU a rank computes on, and what is said where there are too few."""

from collections.abc import Collection
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ntp_kernels import attention
from ntp_launcher import cli, preflight
from ntp_launcher.flags import LaunchError

from ntp.config import Config
from ntp.device import choose_device
from ntp.errors import ConfigError
from ntp.gpu_limits import HEAD_SIZES
from ntp.plan import make_plan
from tests.shapes import LLAMA, make_config

MODEL = {**LLAMA, "head_dim": 64}
TRAIN = {"device": "cuda", "dtype": "bfloat16"}


def config(**parallel: object) -> Config:
    return make_config(MODEL, parallel={"dp": 2, "tp": 2, **parallel}, train=TRAIN)


def look(config: Config, failed: Collection[int] = ()) -> None:
    """What a node looks at before it meets the others."""
    job = SimpleNamespace(config=config, plan=make_plan(config, frozenset(failed)))
    preflight._check_devices(job, SimpleNamespace(nnodes=1, node_rank=None, nproc_per_node=None))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Return `gpus(count)`, after which torch sees so many; nothing may be computed on them."""

    def pretend(count: int) -> list[torch.device]:
        taken: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        return taken

    return pretend


def test_each_rank_has_a_gpu_of_its_own_unless_told_to_share(gpus):
    taken = gpus(4)
    assert [choose_device(config(), place).index for place in range(4)] == [0, 1, 2, 3]
    assert [choose_device(config(ranks_per_gpu=2), place).index for place in range(4)] == [0, 0, 1, 1]
    assert [device.index for device in taken] == [0, 1, 2, 3, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("count", "failed", "shared", "needed"),
    [(4, (), 1, None), (2, (), 1, 4), (3, (3,), 1, None), (3, (0,), 1, 4), (2, (), 2, None), (1, (), 3, 2)],
)
def test_too_few_gpus_are_told_before_any_worker_starts(gpus, count, failed, shared, needed):
    gpus(count)
    asked = config(ranks_per_gpu=shared)
    told = f"need {needed} GPUs, torch sees {count}"
    with nullcontext() if needed is None else pytest.raises(LaunchError, match=told):
        look(asked, failed)


@pytest.mark.parametrize(
    ("model", "train", "told"),
    [
        ({}, {}, None),
        ({"head_dim": 128}, {"device": "auto"}, None),
        ({"head_dim": 16}, {"device": "cpu", "dtype": "float32"}, None),
        ({}, {"dtype": "float32"}, "train.dtype=float32: GPUs compute in bfloat16"),
        ({"head_dim": 96}, {"device": "auto"}, "model.head_dim=96: on GPUs it is 64 or 128"),
    ],
)
def test_what_the_kernels_lack_is_told_before_any_worker_starts(gpus, model, train, told):
    gpus(4)
    asked = make_config({**MODEL, **model}, train={**TRAIN, **train})
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        look(asked)


def test_without_a_gpu_auto_takes_the_processor_and_asks_nothing_of_kernels(gpus):
    gpus(0)
    look(make_config(train={"device": "auto"}))


def test_the_kernels_have_every_head_size_that_is_let_through():
    for tiles in (attention._FORWARD_TILES, attention._KEY_TILES, attention._QUERY_TILES):
        assert tuple(tiles) == HEAD_SIZES


def test_a_dry_run_tells_what_gpus_lack(capsys):
    assert cli.main(["--dry-run", "configs/tiny-cpu.yaml", "--set", "train.device=cuda"]) == 2
    assert "train.dtype=float32: GPUs compute in bfloat16" in capsys.readouterr().err
