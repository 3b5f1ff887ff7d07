"""The layers of a tensor-parallel model; each reads like the layer of a model on one GPU.

A layer holds its weights (a rank's units, see `ntp.weight`) and the group of its replica's ranks, and keeps
no other state. Activations between layers are [M, D] in the compute dtype and equal on every rank of the
replica; inside a layer they are [M, U, ...], the rank's own units. Shapes as in `ntp.ops`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ntp import ops
from ntp.collectives import Group
from ntp.model_config import Recompute
from ntp.weight import Weight


@dataclass(frozen=True)
class Packing:
    """How the M tokens of a microbatch are laid out.

    Attributes:
        documents, positions: i32 [M]; attention stays inside equal documents, positions index the tables.
        bounds: i32 [2, M], what attention needs to know of `documents`; None on CPU.
        seq_len: tokens of a sequence; M is a multiple of it.
        tables: cos and sin of the rotary embedding, f32 [seq_len, H/2] each.
    """

    documents: Tensor
    positions: Tensor
    bounds: Tensor | None
    seq_len: int
    tables: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ColumnParallelLinear:
    """[M, D] -> [M, U, R]: each rank computes the outputs of its units."""

    weight: Weight
    group: Group
    bias: Weight | None = None
    last_use: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, D]; returns [M, U, R], U being the units of this rank."""
        return ops.column_linear(x, self.weight, self.group, self.bias, self.last_use)


@dataclass(frozen=True)
class RowParallelLinear:
    """[M, U, R] -> [M, D]: the sum over the units of all ranks, whatever the cut."""

    weight: Weight
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, U, R], of this rank's units; returns [M, D], the same on every rank."""
        return ops.row_linear(x, self.weight, self.group)


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """ids [M] -> [M, D]."""

    weight: Weight
    group: Group

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int64 [M], the same on every rank; returns [M, D], likewise."""
        return ops.embedding(ids, self.weight, self.group)


@dataclass(frozen=True)
class RMSNorm:
    """The norm of the residual stream: adds x to the residual, returns the normalised sum and the sum."""

    weight: Weight
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x and residual [M, D], None in the first layer; returns two [M, D]."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention behind the norm of the residual stream; a unit is a KV group.

    Rotary embedding, optional QK-norm. Adds x to the residual; returns the layer's output, and that sum.

    Attributes:
        norms: QK-norm weights [H] of queries and keys, or None.
        recompute: what is not kept for the backward pass: "pointwise", the norm's output; "attention", all
            between that and the output projection.
    """

    norm: RMSNorm
    qkv: ColumnParallelLinear
    output: RowParallelLinear
    norms: tuple[Weight, Weight] | None
    head_dim: int
    eps: float
    recompute: Recompute = "none"

    def __call__(self, x: Tensor, residual: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """x and residual [M, D], None in the first layer; returns the output, to be added, and the sum."""
        qkv, group = self.qkv, self.qkv.group
        if residual is not None and self.recompute != "attention":
            projected, summed = ops.normed_linear(
                x,
                residual,
                self.norm.weight,
                qkv.weight,
                self.eps,
                group,
                qkv.bias,
                self.recompute == "pointwise",
            )
            return self.output(self._mixed(projected, packing)), summed
        group.exchange.wait(x)
        normed, summed = self.norm(x, residual)
        if self.recompute == "attention":
            return self.output(recomputed(self._projected_and_mixed, normed, packing)), summed
        return self.output(self._projected_and_mixed(normed, packing)), summed

    def _projected_and_mixed(self, normed: Tensor, packing: Packing) -> Tensor:
        return self._mixed(self.qkv(normed), packing)

    def _mixed(self, projected: Tensor, packing: Packing) -> Tensor:
        """Return what the heads have gathered, [M, U, G * H], for projections [M, U, (G + 2) * H]."""
        qkv = projected.unflatten(2, (-1, self.head_dim))
        q, k, v = ops.qk_norm_rope(
            qkv, packing.positions, packing.tables, self.norms, self.eps, self.qkv.weight, self.qkv.group
        )
        return ops.attention(q, k, v, packing.documents, packing.seq_len, packing.bounds).flatten(2)


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU behind the norm of the residual stream; a unit is a block of gate, up and down columns.

    Adds x to the residual; returns the layer's output, and that sum.

    Attributes:
        recompute: keep neither the norm's nor SwiGLU's output for the backward pass.
    """

    norm: Weight
    gate_up: Weight
    down: Weight
    eps: float
    group: Group
    recompute: bool = False

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [M, D]; returns the output, to be added to the residual, and x + residual."""
        return ops.feed_forward(
            x, residual, self.norm, self.gate_up, self.down, self.eps, self.group, self.recompute
        )


@dataclass(frozen=True)
class VocabParallelHead:
    """The language-model head; no rank holds the logits of the whole vocabulary in training."""

    projection: ColumnParallelLinear
    vocab_size: int

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy f64 [M] of every token, 0 where its target is ignored."""
        projection = self.projection
        return ops.token_losses(projection(x), targets, projection.weight, self.vocab_size, projection.group)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits f32 [M, vocabulary] on every rank, for tests and small models."""
        local = self.projection(x).float().transpose(0, 1)
        units = ops.gather_units(local, self.projection.weight, self.projection.group)
        return units.transpose(0, 1).flatten(1)[:, : self.vocab_size]


T = TypeVar("T")


def recomputed(function: Callable[..., T], *arguments: object) -> T:
    """Call `function`, which backward calls again for what it would have kept."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def refresh_scales(weights: Iterable[Weight], group: Group) -> None:
    """Recompute the column scale of every sharded weight; call it whenever `data` has changed.

    One MAX over the ranks of the replica; every rank passes its weights in the same order.
    """
    sharded = [weight for weight in weights if weight.data.dim() == 3]
    local = [ops.column_scale(weight) for weight in sharded]
    combined = torch.cat(local)
    group.all_reduce(combined.view(torch.int32), "max")
    for weight, scale in zip(sharded, combined.split([part.numel() for part in local]), strict=True):
        if weight.column_scale is None:
            weight.column_scale = scale
        else:
            weight.column_scale.copy_(scale)  # a captured graph knows its address
