"""Models of the `transformers` library as oracles, and the map between their tensors and stored units."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ntp.config import ModelConfig
from ntp.parameters import ParameterSpec


def build_oracle(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """Return the `transformers` model of this shape in float32; all its weights are random."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **config.rope_scaling.model_dump()}
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope,
        "attn_implementation": "eager",
        "max_position_embeddings": 512,
    }
    if config.qk_norm:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    elif config.qkv_bias:
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.08 * noise)
    return model.float()


def stored_units(spec: ParameterSpec, logical: Mapping[str, Tensor]) -> Tensor:
    """Return all units of a parameter, f32 [units, *unit_shape], cut from the tensors of the oracle."""
    stored = torch.zeros(spec.units, *spec.unit_shape)
    for part in spec.parts:
        tensor = logical[part.logical_name]
        rows = tensor.t() if part.transposed else tensor
        for unit, piece in enumerate(rows.split(part.rows)):
            stored[unit, part.offset : part.offset + piece.shape[0]] = piece
    return stored


def logical_tensors(spec: ParameterSpec, stored: Tensor) -> dict[str, Tensor]:
    """Return the oracle's tensors of a parameter from all its units: the inverse of `stored_units`."""
    tensors = {}
    for part in spec.parts:
        rows = torch.cat([unit[part.offset : part.offset + part.rows] for unit in stored])[: part.size]
        tensors[part.logical_name] = rows.t() if part.transposed else rows
    return tensors
