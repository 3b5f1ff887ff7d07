"""Exchange and delivery through the memory of peers, on GPUs: the bits of one rank, however late each is."""

import json
import random
from datetime import timedelta
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ntp.collectives import TorchFabric, build_mesh
from ntp.config import parse_config
from ntp.data import datasets_of
from ntp.peer_memory import PeerMemory
from ntp.plan import make_plan
from ntp.trainer import Trainer

pytestmark = pytest.mark.gpu

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
MODELS = {"llama": MODEL, "qwen": MODEL | {"qk_norm": True}}
TRAIN = {
    "steps": 3,
    "seq_len": 1024,
    "micro_batch": 2,
    "global_batch": 8,
    "grad_group": 2,
    "dtype": "bfloat16",
    "device": "cuda",
}
SEEDS = 4
MILLISECOND = 1_700_000  # cycles
LIMIT = timedelta(seconds=60)


class Late:
    """Holds the device up before signals and waits, at random, and one rank for long before each step."""

    def __init__(self, rank, size, seed):
        self._random = random.Random(1000 * seed + rank)
        self._long = 60 if rank == seed % size else 0

    def before_step(self):
        torch.cuda._sleep(self._long * MILLISECOND)

    def __call__(self, method):
        def late(memory, *arguments):
            if self._random.random() < 0.3:
                torch.cuda._sleep(self._random.randrange(MILLISECOND // 2))
            method(memory, *arguments)

        return late


def hashes_of(config, fabric, rank, device, late):
    plan = make_plan(config)
    mesh = build_mesh(plan, rank, fabric)
    trainer = Trainer(config, plan, mesh, datasets_of(config), device)
    for step in range(1, config.train.steps + 1):
        late.before_step()
        result = trainer.step(step)
    return trainer.hashes(), result.loss


def run_rank(rank, model, dp, tp, meeting, results):
    size, device = dp * tp, torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{meeting}", rank=rank, world_size=size)
    signal, await_signals = PeerMemory.signal, PeerMemory.await_signals
    found = {}
    for graphs in (False, True):
        for seed in range(SEEDS if size > 1 else 1):
            late = Late(rank, size, seed)
            PeerMemory.signal, PeerMemory.await_signals = late(signal), late(await_signals)
            parallel = {"dp": dp, "tp": tp, "exchange": "peer"}
            sections = {
                "model": MODELS[model],
                "train": TRAIN | {"cuda_graphs": graphs},
                "parallel": parallel,
            }
            config = parse_config(json.dumps(sections))
            fabric = TorchFabric(range(size), rank, lambda: None, LIMIT, LIMIT, device, through_peers=True)
            found[graphs, seed] = hashes_of(config, fabric, rank, device, late)
            fabric.close()
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


@cache
def hashes(model, dp, tp):
    results = mp.get_context("spawn").SimpleQueue()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        mp.spawn(run_rank, (model, dp, tp, f"{directory}/meeting", results), dp * tp)
        return results.get()


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("model", list(MODELS))
def test_ranks_that_are_late_change_no_bit(model, dp, tp):
    if dp * tp > torch.cuda.device_count():
        pytest.skip(f"{dp}x{tp} needs as many GPUs")
    reference = set(hashes(model, 1, 1).values())
    assert len(reference) == 1
    assert set(hashes(model, dp, tp).values()) == reference
