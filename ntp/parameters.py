"""Which parameters a model has, how each is stored in units, and its logical form.

Storage: every sharded parameter is *rows of units*, `[units, rows, hidden]` (a bias `[units, rows]`).
Weights whose contraction dimension is sharded (o_proj, down_proj) are stored transposed: the sharded
dimension is then always the rows, and the trainer needs three GEMM forms only. A replicated parameter is one
unit.

Logical form: the tensors of the Hugging Face layout (`model.layers.0.self_attn.q_proj.weight`), without
padding. A storage unit is a stack of `Part`s, each a block of rows of one logical tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from ntp.config import ModelConfig
from ntp.units import UnitKind, count_units

BLOCK = 4096
"""Elements in a fixed block of a unit: the grain of optimizer slices and of the gradient norm. Part of the
numerics: changing it changes `grad_norm_bits`."""

Init = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True, slots=True)
class Part:
    """A block of rows in every unit that belongs to one logical tensor.

    Unit `u` holds rows `[u * rows, (u + 1) * rows)` of the logical tensor (columns, if `transposed`), cut off
    at `size`; what lies beyond is padding and stays zero.
    """

    logical_name: str
    offset: int
    rows: int
    size: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One stored parameter.

    Attributes:
        index: position in canonical order (the order of the forward pass).
        kind: unit kind, or None where the parameter is replicated on every rank.
        units: number of units over the whole model.
        unit_shape: shape of one unit, `(rows, hidden)` or `(rows,)`.
        decay: whether weight decay applies.
    """

    index: int
    name: str
    kind: UnitKind | None
    units: int
    unit_shape: tuple[int, ...]
    parts: tuple[Part, ...]
    init: Init
    decay: bool

    @property
    def unit_elements(self) -> int:
        """Elements in one unit, padding included."""
        return prod(self.unit_shape)

    @property
    def blocks(self) -> int:
        """Fixed blocks in one unit."""
        return count_units(self.unit_elements, BLOCK)

    def logical_shape(self, part: Part) -> tuple[int, ...]:
        """Shape of the logical tensor that `part` belongs to."""
        rest = self.unit_shape[1:]
        return (*rest, part.size) if part.transposed else (part.size, *rest)


def slice_of(spec: ParameterSpec, holder: int, holders: int) -> tuple[int, int]:
    """Element range `[start, stop)` inside every unit of `spec` whose optimizer state `holder` keeps.

    The fixed blocks of a unit are spread over the holders (the live replicas); which of them gets the larger
    shares rotates from parameter to parameter. A holder may get an empty range.
    """
    turn = (holder + spec.index) % holders
    start, stop = (spec.blocks * place // holders for place in (turn, turn + 1))
    return min(start * BLOCK, spec.unit_elements), min(stop * BLOCK, spec.unit_elements)


def kept_places(holder: int, holders: int, copies: int) -> tuple[int, ...]:
    """Places whose slices `holder` keeps: its own first, then those of its predecessors.

    Every slice is thus kept by `copies` consecutive holders (all of them, where there are fewer), which
    compute the same update.
    """
    return tuple((holder - back) % holders for back in range(min(copies, holders)))


def unit_counts(model: ModelConfig) -> dict[UnitKind, int]:
    """How many units of each kind the model has."""
    return {
        UnitKind.KV: model.num_key_value_heads,
        UnitKind.FFN: count_units(model.intermediate_size, model.ffn_unit),
        UnitKind.VOCAB: count_units(model.vocab_size, model.vocab_unit),
    }


def parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Every stored parameter of the model in canonical order."""
    return tuple(
        ParameterSpec(index, name, kind, units, shape, parts, init, decay=len(shape) > 1)
        for index, (name, kind, units, shape, parts, init) in enumerate(_rows(model))
    )


_Row = tuple[str, UnitKind | None, int, tuple[int, ...], tuple[Part, ...], Init]


def _rows(model: ModelConfig) -> Iterator[_Row]:
    yield _vocabulary(model, "embedding", "model.embed_tokens.weight")
    for layer in range(model.num_hidden_layers):
        yield from _attention(model, f"layers.{layer}.", f"model.layers.{layer}.")
        yield from _mlp(model, f"layers.{layer}.", f"model.layers.{layer}.")
    yield _replicated("norm", "model.norm.weight", model.hidden_size)
    if not model.tie_word_embeddings:
        yield _vocabulary(model, "head", "lm_head.weight")


def _replicated(name: str, logical_name: str, size: int) -> _Row:
    return name, None, 1, (size,), (Part(logical_name, 0, size, size),), "ones"


def _vocabulary(model: ModelConfig, name: str, logical_name: str) -> _Row:
    parts = (Part(logical_name, 0, model.vocab_unit, model.vocab_size),)
    shape = (model.vocab_unit, model.hidden_size)
    return name, UnitKind.VOCAB, unit_counts(model)[UnitKind.VOCAB], shape, parts, "normal"


def _attention(model: ModelConfig, name: str, logical: str) -> Iterator[_Row]:
    kv_heads, head_dim, hidden = model.num_key_value_heads, model.head_dim, model.hidden_size
    query_rows = model.num_attention_heads // kv_heads * head_dim
    attention = f"{logical}self_attn."

    def fused(suffix: str) -> tuple[Part, ...]:
        return (
            Part(f"{attention}q_proj.{suffix}", 0, query_rows, query_rows * kv_heads),
            Part(f"{attention}k_proj.{suffix}", query_rows, head_dim, head_dim * kv_heads),
            Part(f"{attention}v_proj.{suffix}", query_rows + head_dim, head_dim, head_dim * kv_heads),
        )

    rows = query_rows + 2 * head_dim
    yield _replicated(f"{name}attention_norm", f"{logical}input_layernorm.weight", hidden)
    yield f"{name}qkv", UnitKind.KV, kv_heads, (rows, hidden), fused("weight"), "normal"
    if model.qkv_bias:
        yield f"{name}qkv_bias", UnitKind.KV, kv_heads, (rows,), fused("bias"), "zeros"
    if model.qk_norm:
        yield _replicated(f"{name}q_norm", f"{attention}q_norm.weight", head_dim)
        yield _replicated(f"{name}k_norm", f"{attention}k_norm.weight", head_dim)
    output = (Part(f"{attention}o_proj.weight", 0, query_rows, query_rows * kv_heads, transposed=True),)
    yield f"{name}o", UnitKind.KV, kv_heads, (query_rows, hidden), output, "normal"


def _mlp(model: ModelConfig, name: str, logical: str) -> Iterator[_Row]:
    width, size, hidden = model.ffn_unit, model.intermediate_size, model.hidden_size
    units = unit_counts(model)[UnitKind.FFN]
    gate_up = (
        Part(f"{logical}mlp.gate_proj.weight", 0, width, size),
        Part(f"{logical}mlp.up_proj.weight", width, width, size),
    )
    down = (Part(f"{logical}mlp.down_proj.weight", 0, width, size, transposed=True),)
    yield _replicated(f"{name}mlp_norm", f"{logical}post_attention_layernorm.weight", hidden)
    yield f"{name}gate_up", UnitKind.FFN, units, (2 * width, hidden), gate_up, "normal"
    yield f"{name}down", UnitKind.FFN, units, (width, hidden), down, "normal"
