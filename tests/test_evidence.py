"""The hashes of a run are what their definition says, computed here from whole tensors on one rank."""

import hashlib

import pytest
import torch

from ntp.data import datasets_of
from ntp.plan import make_plan
from ntp.testing import simulate
from ntp.trainer import Trainer
from tests.shapes import LLAMA, QWEN, make_config
from tests.transformers_oracle import logical_tensors


def whole_tensors(trainer, flat):
    """Logical name -> tensor of a flat state, on a rank that has everything."""
    found = {}
    for spec in trainer.optimizer.buffer.specs:
        (part,) = [part for part in trainer.optimizer.slices if part.spec is spec]
        found |= logical_tensors(spec, part.of(flat).reshape(spec.units, *spec.unit_shape))
    return found


def defined(flats):
    """SHA-256 over name, shape and bytes of every tensor, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(flats[0]):
        digest.update(f"{name} {tuple(flats[0][name].shape)}\n".encode())
        for tensors in flats:
            digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("model", [LLAMA, QWEN])
def test_hashes_cover_name_shape_and_bytes_of_every_tensor(model):
    torch.set_num_threads(1)
    config = make_config(model)
    plan, data = make_plan(config), datasets_of(config)

    def body(member):
        trainer = Trainer(config, plan, member.mesh, data, torch.device("cpu"))
        trainer.step(1)
        return trainer, trainer.hashes()

    ((trainer, hashes),) = simulate(body, plan).values()
    flats = [whole_tensors(trainer, flat) for flat in trainer.optimizer.flats]
    assert hashes.weights_sha256 == defined(flats[:1])
    assert hashes.state_sha256 == defined(flats)
