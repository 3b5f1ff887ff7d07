"""The guarantee: whatever is missing, the same bits at every step and in the end."""

import dataclasses

import pytest
import torch

from ntp.data import datasets_of
from tests.shapes import LLAMA, ODD, QWEN, make_config
from tests.training import train

LLAMA_BIAS = {
    **LLAMA,
    "qkv_bias": True,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

MESHES = [
    ({"dp": 2, "tp": 4}, ()),
    ({"dp": 2, "tp": 4}, (3,)),
    ({"dp": 2, "tp": 4}, (3, 5)),
    ({"dp": 2, "tp": 4}, (0,)),
    ({"dp": 2, "tp": 4}, (1, 2, 3)),
    ({"dp": 2, "tp": 4}, (4, 5, 6, 7)),
    ({"dp": 2, "tp": 4}, (1, 2, 3, 5, 6, 7)),
    ({"dp": 1, "tp": 3}, ()),
    ({"dp": 4, "tp": 2}, ()),
    ({"dp": 2, "tp": 4, "policy": "uniform"}, (3,)),
    ({"dp": 2, "tp": 4, "standbys": 2}, (3, 5)),
    ({"dp": 2, "tp": 4, "overlap_exchange": False}, (3,)),
    ({"dp": 2, "tp": 4, "standbys": 1, "rank_map": (8, 5, 2, 7, 0, 3, 6, 1, 4)}, (3, 5, 6)),
]
ODD_MESHES = [({"dp": 1, "tp": tp}, ()) for tp in (2, 3, 4, 5)] + [
    ({"dp": 2, "tp": 3}, (1,)),
    ({"dp": 3, "tp": 2}, (5,)),
]
CASES = [
    *[("llama", dtype, *mesh) for dtype in ("float32", "bfloat16") for mesh in MESHES],
    *[("qwen", dtype, *mesh) for dtype in ("float32", "bfloat16") for mesh in MESHES[:4]],
    *[("odd", dtype, *mesh) for dtype in ("float32", "bfloat16") for mesh in ODD_MESHES],
    *[("bias", "bfloat16", *mesh) for mesh in (MESHES[1], MESHES[7])],
]
SHAPES = {
    "llama": (LLAMA, {"steps": 3}),
    "qwen": (QWEN, {"steps": 3}),
    "bias": (LLAMA_BIAS, {"steps": 2}),
    "odd": (ODD, {"steps": 2, "grad_group": 3, "seq_len": 32}),
}


def configuration(shape, dtype, parallel):
    model, settings = SHAPES[shape]
    return make_config(model, parallel=parallel, train={**settings, "dtype": dtype})


@pytest.fixture(scope="module")
def reference():
    """The run of one rank, computed once per shape and dtype."""
    torch.set_num_threads(1)
    runs = {}

    def get(shape, dtype):
        if (shape, dtype) not in runs:
            config = configuration(shape, dtype, {"dp": 1, "tp": 1})
            data = datasets_of(config)
            runs[shape, dtype] = data, train(config, data)
        return runs[shape, dtype]

    return get


@pytest.mark.parametrize(("shape", "dtype", "parallel", "failed"), CASES)
def test_every_mesh_computes_the_bits_of_one_rank(reference, shape, dtype, parallel, failed):
    data, alone = reference(shape, dtype)
    run = train(configuration(shape, dtype, parallel), data, failed)
    assert run.steps == alone.steps
    assert run.hashes == alone.hashes


def test_the_hash_sees_a_single_bit(reference):
    data, alone = reference("llama", "float32")
    config = configuration("llama", "float32", {"dp": 1, "tp": 1})
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 1})})
    assert train(other, data, steps=1).hashes != train(config, data, steps=1).hashes
    assert dataclasses.replace(alone.hashes, weights_sha256="") != alone.hashes


def test_work_is_divided_on_a_wide_shape():
    torch.set_num_threads(1)
    wide = {**LLAMA, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 512, "vocab_unit": 16}
    usage = {}
    for tp in (1, 4):
        config = make_config(wide, parallel={"dp": 1, "tp": tp}, train={"steps": 1, "global_batch": 1})
        usage[tp] = train(config, datasets_of(config)).usage
    assert usage[4].parameter_bytes < 0.35 * usage[1].parameter_bytes
    assert usage[4].gemm_flops < 0.35 * usage[1].gemm_flops
