"""The model against `transformers`, and its bits on simulated tensor-parallel ranks against one rank."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.config import ModelConfig
from ntp.data import Batch
from ntp.layers import refresh_scales
from ntp.model import Model
from ntp.parameters import parameter_specs
from ntp.units import UnitRange, spread
from ntp.weight import Weight
from tests.ranks import on_ranks
from tests.transformers_oracle import build_oracle, logical_tensors, stored_units

SEQ_LEN, SEQUENCES = 24, 2

TINY: dict[str, Any] = {
    "hidden_size": 80,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 16,
    "vocab_size": 150,
    "ffn_unit": 16,
    "vocab_unit": 16,
}
SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": ModelConfig(**TINY),
    "llama-scaled-tied": ModelConfig(
        **TINY, rope_theta=100.0, rope_scaling=SCALING, tie_word_embeddings=True
    ),
    "qwen2": ModelConfig(**TINY, qkv_bias=True),
    "qwen3-tied": ModelConfig(**TINY, qk_norm=True, tie_word_embeddings=True, rms_norm_eps=1e-6),
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@dataclass
class Outcome:
    """Losses [sequences], logits [M, vocabulary] and gradients in units, by name."""

    losses: Tensor
    logits: Tensor
    grads: dict[str, Tensor]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same bytes, NaN included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def make_batch(config: ModelConfig, documents: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(config.vocab_size, (SEQUENCES * SEQ_LEN,), generator=generator)
    targets = torch.randint(config.vocab_size, (SEQUENCES * SEQ_LEN,), generator=generator)
    targets[5] = targets[30] = -100
    place = torch.arange(SEQUENCES * SEQ_LEN) % SEQ_LEN
    cut = 9 if documents else SEQ_LEN
    starts = torch.arange(SEQUENCES * SEQ_LEN) // SEQ_LEN * 2 + (place >= cut).long()
    positions = torch.where(place >= cut, place - cut, place)
    return Batch(inputs, targets, starts.int(), positions.int(), int((targets >= 0).sum()))


def run(
    config: ModelConfig,
    units: dict[str, Tensor],
    batch: Batch,
    degree: int = 1,
    dtype: torch.dtype = torch.float32,
    microbatches: int = 1,
) -> Outcome:
    """Run the model on `degree` simulated ranks, which must see the same bits of losses and logits."""
    outcomes = on_ranks(lambda group: run_rank(config, units, batch, group, dtype, microbatches), degree)
    for other in outcomes[1:]:
        assert same_bits(other.losses, outcomes[0].losses)
        assert same_bits(other.logits, outcomes[0].logits)
    return replace(outcomes[0], grads=join_grads(config, [outcome.grads for outcome in outcomes]))


def join_grads(config: ModelConfig, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined = {}
    for spec in parameter_specs(config):
        pieces = [grads[spec.name] for grads in ranks]
        if spec.kind is None:
            assert all(same_bits(piece, pieces[0]) for piece in pieces), spec.name
            joined[spec.name] = pieces[0].unsqueeze(0)
        else:
            joined[spec.name] = torch.cat(pieces)
    return joined


def run_rank(
    config: ModelConfig,
    units: dict[str, Tensor],
    batch: Batch,
    group: Group,
    dtype: torch.dtype,
    microbatches: int,
) -> Outcome:
    weights, ready = {}, []
    for spec in parameter_specs(config):
        held = UnitRange(0, 1) if spec.kind is None else spread(spec.units, group.size)[group.rank]
        data = units[spec.name][held.start : held.stop].to(dtype).clone()
        data = data[0] if spec.kind is None else data
        weight = Weight(spec.name, data, spec.units, held.start, torch.zeros(data.shape))
        weight.on_grad_ready = lambda name=spec.name: ready.append(name)
        weights[spec.name] = weight
    refresh_scales(weights.values(), group)
    model = Model(config, weights, group, SEQ_LEN)
    for _ in range(microbatches):
        losses = model.loss(batch)
        losses.sum().backward()
    assert sorted(ready) == sorted(list(weights) * microbatches), "one call per weight and microbatch"
    assert ready[-1] == "embedding"
    with torch.no_grad():
        logits = model.logits(batch)
    return Outcome(losses.detach(), logits, {name: weight.grad for name, weight in weights.items()})


def oracle_case(family: str) -> tuple[ModelConfig, torch.nn.Module, dict[str, Tensor]]:
    config = FAMILIES[family]
    oracle = build_oracle(config)
    state = oracle.state_dict()
    return config, oracle, {spec.name: stored_units(spec, state) for spec in parameter_specs(config)}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_losses_and_every_gradient_agree_with_transformers(family: str):
    config, oracle, units = oracle_case(family)
    batch = make_batch(config, documents=False)
    ours = run(config, units, batch)
    logits = oracle(batch.inputs.view(SEQUENCES, SEQ_LEN)).logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(ours.logits, logits.detach(), rtol=1e-4, atol=1e-4)
    expected = losses.detach().view(SEQUENCES, SEQ_LEN).sum(1).double()
    torch.testing.assert_close(ours.losses, expected, rtol=1e-5, atol=1e-4)
    parameters = dict(oracle.named_parameters())
    for spec in parameter_specs(config):
        for name, grad in logical_tensors(spec, ours.grads[spec.name]).items():
            expected = parameters[name].grad
            assert expected is not None
            scale = expected.abs().max().item()
            torch.testing.assert_close(
                grad, expected, rtol=1e-4, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
            parameters[name].grad = None
    assert all(parameter.grad is None for parameter in parameters.values()), "a gradient was not compared"


def test_packed_documents_are_independent_sequences():
    config, oracle, units = oracle_case("llama")
    batch = make_batch(config)
    ours = run(config, units, batch)
    with torch.no_grad():
        pieces = [
            oracle(batch.inputs[batch.documents == document].unsqueeze(0)).logits[0]
            for document in batch.documents.unique()
        ]
    torch.testing.assert_close(ours.logits, torch.cat(pieces), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_logits_and_gradients_have_the_same_bits_at_every_degree(family: str, dtype: torch.dtype):
    config, _, units = oracle_case(family)
    batch = make_batch(config)
    alone = run(config, units, batch, dtype=dtype)
    assert math.isfinite(alone.losses.sum())
    for degree in (2, 3, 7):  # on 7 ranks two have no KV group
        cut = run(config, units, batch, degree, dtype)
        assert torch.equal(cut.losses, alone.losses)
        assert torch.equal(cut.logits, alone.logits)
        for name, grad in alone.grads.items():
            assert torch.equal(cut.grads[name], grad), (name, degree)


def test_microbatches_accumulate_into_the_gradient_buffer():
    config, _, units = oracle_case("qwen3-tied")
    batch = make_batch(config)
    once, twice = run(config, units, batch), run(config, units, batch, microbatches=2)
    for name in once.grads.keys() - {"embedding"}:
        assert torch.equal(twice.grads[name], 2 * once.grads[name]), name
    torch.testing.assert_close(twice.grads["embedding"], 2 * once.grads["embedding"])


def test_padding_gets_no_gradient():
    config, _, units = oracle_case("llama")
    grads = run(config, units, make_batch(config)).grads
    for spec in parameter_specs(config):
        inside = stored_units(spec, {p.logical_name: torch.ones(spec.logical_shape(p)) for p in spec.parts})
        assert torch.equal(grads[spec.name].masked_fill(inside.bool(), 0), torch.zeros_like(inside)), (
            spec.name
        )


@pytest.mark.parametrize("degree", [1, 3])
def test_a_nan_in_one_unit_reaches_losses_and_gradients_on_every_rank(degree: int):
    config, _, units = oracle_case("llama")
    units["layers.0.down"][3, 2, 7] = torch.nan
    outcome = run(config, units, make_batch(config), degree)
    assert outcome.losses.isnan().all()
    assert outcome.grads["embedding"].isnan().any()
