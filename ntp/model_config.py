"""The `model` section of a configuration: the decoder's shape, and the width of its indivisible units."""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from ntp.section import MultipleOf16, Positive, PositiveFloat, Section

Recompute = Literal["none", "pointwise", "attention", "block"]
"""What backward computes again rather than keeps, see `ntp.model.Model`."""


class RopeScaling(Section):
    """Llama 3's frequency scaling of the rotary embedding."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: Positive

    @model_validator(mode="after")
    def _bands_are_ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must exceed low_freq_factor={self.low_freq_factor}"
            )
        return self


class ModelConfig(Section):
    """Shape of a Llama 3 or Qwen3 decoder, and the width of its indivisible units."""

    init_from: Annotated[str, Field(min_length=1)] | None = None  # Hugging Face folder with the first weights
    hidden_size: MultipleOf16
    intermediate_size: Positive
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_attention_heads: Positive
    num_key_value_heads: Positive  # default: num_attention_heads
    head_dim: MultipleOf16  # default: hidden_size / num_attention_heads
    vocab_size: Positive
    rope_theta: PositiveFloat = 500000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02
    ffn_unit: MultipleOf16 = 128  # columns of one FFN unit
    vocab_unit: MultipleOf16 = 128  # rows of one vocabulary unit

    @model_validator(mode="before")
    @classmethod
    def _derive_heads(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, Any]", data)
        filled = {key: value for key, value in given.items() if key not in _DERIVED or value is not None}
        heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
        if type(heads) is int and heads > 0:
            filled.setdefault("num_key_value_heads", heads)
            if type(hidden) is int and "head_dim" not in filled:
                if hidden % heads:
                    raise ValueError(
                        f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; set head_dim"
                    )
                filled["head_dim"] = hidden // heads
        return filled

    @model_validator(mode="after")
    def _heads_form_groups(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        return self


_DERIVED = ("num_key_value_heads", "head_dim")
