"""The decoder of the Llama 3 and Qwen3 families.

    model = Model(config.model, weights, group, seq_len)
    refresh_exponents(weights.values(), group)      # after every change of the weights
    model.loss(batch).sum().backward()              # adds to every weight's main_grad

It reads like a model on one GPU: which units a rank holds is in its weights, what ranks exchange is in the
layers. The residual stream is in the compute dtype, that of the weights.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.config import ModelConfig
from ntp.layers import (
    Attention,
    ColumnParallelLinear,
    Packing,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from ntp.weight import Weight


class Tokens(Protocol):
    """A microbatch of M tokens, whole sequences one after the other (see `ntp.data.Batch`)."""

    @property
    def inputs(self) -> Tensor:
        """Ids, int64 [M]."""
        ...

    @property
    def targets(self) -> Tensor:
        """The ids that follow, int64 [M]; -100 where there is nothing to predict."""
        ...

    @property
    def documents(self) -> Tensor:
        """Which document a token is of, int32 [M]; attention stays inside."""
        ...

    @property
    def positions(self) -> Tensor:
        """The place in the document, int32 [M], below seq_len."""
        ...


class Model:
    """A rank's share of the decoder.

    Args:
        weights: by canonical name (`ntp.parameters`).
        group: the ranks of this replica.
        seq_len: tokens of a sequence.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], group: Group, seq_len: int):
        head = weights["embedding" if config.tie_word_embeddings else "head"]
        self.seq_len = seq_len
        self.embedding = VocabParallelEmbedding(weights["embedding"], group)
        self.blocks = [Block(config, weights, f"layers.{i}.", group) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(weights["norm"], config.rms_norm_eps)
        projection = ColumnParallelLinear(head, group, last_use=not config.tie_word_embeddings)
        self.head = VocabParallelHead(projection, config.vocab_size)
        self.tables = rope_tables(config, seq_len, head.data.device)

    def loss(self, batch: Tokens) -> Tensor:
        """Return the sum of token losses of every sequence, f64 [M / seq_len]."""
        losses = self.head.losses(self.hidden(batch), batch.targets)
        return losses.view(-1, self.seq_len).sum(1)

    def logits(self, batch: Tokens) -> Tensor:
        """Return f32 [M, vocabulary] on every rank, for tests and small models."""
        return self.head.logits(self.hidden(batch))

    def hidden(self, batch: Tokens) -> Tensor:
        """Return the normalised hidden states [M, D] that the head reads."""
        packing = Packing(batch.documents, batch.positions, self.seq_len, self.tables)
        x, residual = self.embedding(batch.inputs), None
        for block in self.blocks:
            x, residual = block(x, residual, packing)
        return self.norm(x, residual)[0]


class Block:
    """A decoder layer: attention, then the feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], prefix: str, group: Group):
        def weight(name: str) -> Weight:
            return weights[prefix + name]

        eps = config.rms_norm_eps
        bias = weight("qkv_bias") if config.qkv_bias else None
        norms = (weight("q_norm"), weight("k_norm")) if config.qk_norm else None
        qkv, output = ColumnParallelLinear(weight("qkv"), group, bias), RowParallelLinear(weight("o"), group)
        self.attention_norm = RMSNorm(weight("attention_norm"), eps)
        self.attention = Attention(qkv, output, norms, config.head_dim, eps)
        self.mlp_norm = RMSNorm(weight("mlp_norm"), eps)
        self.mlp = SwiGLU(
            ColumnParallelLinear(weight("gate_up"), group), RowParallelLinear(weight("down"), group)
        )

    def __call__(self, x: Tensor, residual: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return the layer's output [M, D], not yet added to the residual stream, and that stream."""
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, packing)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


def rope_tables(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, f32 [positions, H/2], computed in float64 on the CPU for every device."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rope_frequencies(config)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of every pair of a head, f64 [H/2], with Llama 3's scaling if configured.

    Scaling divides the frequency of long wavelengths by `factor`, leaves short ones, and blends between.
    """
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-powers
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
