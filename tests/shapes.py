"""Small configurations for tests."""

from typing import Any

from ntp.config import Config

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 272,
    "ffn_unit": 16,
    "vocab_unit": 32,
}
"""Units: 4 KV groups, 5 FFN blocks, 9 vocabulary blocks (the last one padded)."""

QWEN: dict[str, Any] = {**LLAMA, "qk_norm": True, "tie_word_embeddings": True}

ODD: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 1000,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 509,
    "ffn_unit": 64,
    "vocab_unit": 64,
}
"""Nothing divides anything: 3 KV groups, 16 FFN blocks, 8 vocabulary blocks."""


def make_config(model: dict[str, Any] = LLAMA, **sections: dict[str, Any]) -> Config:
    """A configuration of a few steps; keyword arguments update whole sections."""
    train = {"steps": 3, "seq_len": 16, "global_batch": 8, "grad_group": 1, **sections.pop("train", {})}
    return Config.model_validate({"model": model, "train": train, **sections}, strict=False)
