"""The decoder of the Llama 3 and Qwen3 families.

    model = Model(config.model, weights, group, seq_len)
    refresh_scales(weights.values(), group)         # after every change of the weights
    model.loss(batch).sum().backward()              # adds to every weight's main_grad

It reads like a model on one GPU: which units a rank holds is in its weights, what ranks exchange is in the
layers. The residual stream is in the compute dtype, that of the weights.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.graphs import GraphedSegments, Segment
from ntp.layers import (
    Attention,
    ColumnParallelLinear,
    FeedForward,
    Packing,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    recomputed,
)
from ntp.model_config import ModelConfig, Recompute
from ntp.ops import document_bounds
from ntp.weight import Weight

_BLOCKS_OF_A_GRAPH = 4


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
        recompute: what backward computes again rather than keeps: "none", "pointwise" (norms and SwiGLU, no
            product), "attention" (but not the output projection) or "block", of which
            two tensors [M, D] are kept. The bits are the same.
        graphs: replay the blocks as CUDA graphs, where what they exchange allows it. The bits are the same.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        group: Group,
        seq_len: int,
        recompute: Recompute = "none",
        graphs: bool = False,
    ):
        head = weights["embedding" if config.tie_word_embeddings else "head"]
        self.seq_len, self._group = seq_len, group
        self.embedding = VocabParallelEmbedding(weights["embedding"], group)
        prefixes = [f"layers.{layer}." for layer in range(config.num_hidden_layers)]
        self.blocks = [Block(config, weights, prefix, group, recompute) for prefix in prefixes]
        graphs = graphs and group.exchange.can_be_captured
        self._graphed = GraphedSegments(list(self._segments(weights)), group) if graphs else None
        self._packing: Packing | None = None
        self._packings: dict[int, Packing] = {}
        self.norm = RMSNorm(weights["norm"], config.rms_norm_eps)
        projection = ColumnParallelLinear(head, group, last_use=not config.tie_word_embeddings)
        self.head = VocabParallelHead(projection, config.vocab_size)
        self.tables = rope_tables(config, seq_len, head.data.device)

    def retire(self) -> None:
        """Give up the graphs and their memory."""
        self._graphed = None

    def loss(self, batch: Tokens) -> Tensor:
        """Return the sum of token losses of every sequence, f64 [M / seq_len]."""
        losses = self.head.losses(self.hidden(batch), batch.targets)
        return losses.view(-1, self.seq_len).sum(1)

    def logits(self, batch: Tokens) -> Tensor:
        """Return f32 [M, vocabulary] on every rank, for tests and small models."""
        return self.head.logits(self.hidden(batch))

    def hidden(self, batch: Tokens) -> Tensor:
        """Return the normalised hidden states [M, D] that the head reads."""
        bounds = document_bounds(batch.documents, self.seq_len)
        packing = Packing(batch.documents, batch.positions, bounds, self.seq_len, self.tables)
        x = self.embedding(batch.inputs)
        if self._graphed is None:
            return self.norm(*self._through(self.blocks, packing, x))[0]
        self._keep(packing)
        return self.norm(*self._graphed(x))[0]

    def _through(
        self, blocks: Iterable["Block"], packing: Packing, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the blocks make of x, all of it there, and the residual stream."""
        for block in blocks:
            x, residual = block(x, residual, packing)
        assert residual is not None
        self._group.exchange.wait(x)
        return x, residual

    def _segments(self, weights: Mapping[str, Weight]) -> Iterator[Segment]:
        """A few blocks each: gradients of one segment travel while another is in backward."""
        for first in range(0, len(self.blocks), _BLOCKS_OF_A_GRAPH):
            some = range(first, min(first + _BLOCKS_OF_A_GRAPH, len(self.blocks)))
            prefixes = tuple(f"layers.{layer}." for layer in some)
            used = [weight for name, weight in weights.items() if name.startswith(prefixes)]
            yield Segment(partial(self._run, some), used)

    def _run(self, some: range, *stream: Tensor) -> tuple[Tensor, ...]:
        assert self._packing is not None
        return self._through((self.blocks[layer] for layer in some), self._packing, *stream)

    def _keep(self, packing: Packing) -> None:
        """Put the packing where graphs look for it."""
        kept = self._packing = self._packings.setdefault(len(packing.documents), packing)
        if kept is not packing:
            assert kept.bounds is not None
            assert packing.bounds is not None
            kept.documents.copy_(packing.documents)
            kept.positions.copy_(packing.positions)
            kept.bounds.copy_(packing.bounds)


class Block:
    """A decoder layer: attention, then the feed-forward layer, each behind a norm of the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        prefix: str,
        group: Group,
        recompute: Recompute,
    ):
        def weight(name: str) -> Weight:
            return weights[prefix + name]

        eps = config.rms_norm_eps
        bias = weight("qkv_bias") if config.qkv_bias else None
        norms = (weight("q_norm"), weight("k_norm")) if config.qk_norm else None
        qkv, output = ColumnParallelLinear(weight("qkv"), group, bias), RowParallelLinear(weight("o"), group)
        norm = RMSNorm(weight("attention_norm"), eps)
        self.attention = Attention(norm, qkv, output, norms, config.head_dim, eps, recompute)
        self._recompute, self._group = recompute == "block", group
        up, down, again = weight("gate_up"), weight("down"), recompute == "pointwise"
        self.mlp = FeedForward(weight("mlp_norm"), up, down, eps, group, again)

    def __call__(self, x: Tensor, residual: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """Return the layer's output [M, D], not yet added to the residual stream, and that stream.

        Parts of the output may still be under way (`ntp.exchange`).
        """
        if self._recompute and torch.is_grad_enabled():
            self._group.exchange.wait(x)
            return recomputed(self._forward, x.clone(), residual, packing)  # storage of x is used again
        return self._forward(x, residual, packing)

    def _forward(self, x: Tensor, residual: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        return self.mlp(*self.attention(x, residual, packing))


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
