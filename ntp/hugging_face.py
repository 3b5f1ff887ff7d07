"""Weights in from a folder in Hugging Face layout: `config.json` and safetensors, one file or several.

Architectures: Llama 3.x, Qwen2 and Qwen3 (dense). Every rank reads the rows (columns, for the transposed
weights) of its own slices from the files, one parameter at a time, so that no rank ever holds the whole
model. Whatever a model has that the trainer does not compute is refused by name, never ignored.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ntp.config import ModelConfig
from ntp.errors import HuggingFaceError
from ntp.optim import DistributedOptimizer
from ntp.parameters import ParameterSpec, Part, parameter_specs
from ntp.units import UnitRange

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # derived from rope_theta; old Llama files hold it
_DTYPES = {"F32", "F16", "BF16"}
_REFUSED = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
_REFUSED |= {"partial_rotary_factor": 1.0, "quantization_config": None}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def import_weights(folder: Path, model: ModelConfig, optimizer: DistributedOptimizer) -> None:
    """Fill this rank's master slices from a folder; `Trainer.publish` then renews the parameters.

    Raises HuggingFaceError for a folder that is not whole, does not fit `model`, or holds tensors that the
    model has no place for.
    """
    with opened(folder, model) as weights:
        for piece in optimizer.slices:
            values = weights.units(piece.spec, piece.units)
            piece.of(optimizer.master).copy_(values[:, piece.start : piece.stop])
            if piece.spec.name == "embedding" and weights.has(_HEAD) and model.tie_word_embeddings:
                weights.check_tie(piece.spec, piece.units, values)


@contextmanager
def opened(folder: Path, model: ModelConfig) -> Iterator["Weights"]:
    """The weights of a folder that fits `model`, values not looked at. Raises HuggingFaceError as above."""
    check_model(folder, model)
    with Weights.open(folder) as weights:
        specs = parameter_specs(model)
        weights.check({part.logical_name: spec.logical_shape(part) for spec in specs for part in spec.parts})
        yield weights


class Weights:
    """The tensors of a folder, read in parts. A context manager."""

    def __init__(self, folder: Path, places: Mapping[str, str]):
        self._folder, self._places = folder, places
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises HuggingFaceError where a file that is named is missing or not safetensors."""
        index = folder / INDEX
        if not index.exists():
            weights = cls(folder, {})
            weights._places = dict.fromkeys(weights._file(SINGLE).keys(), SINGLE)
            return weights
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise HuggingFaceError(f"{str(index)!r} has no weight_map from tensors to files")
        weights = cls(folder, places)
        for name, file in places.items():
            if name not in weights._file(file).keys():  # noqa: SIM118 - not a mapping
                raise HuggingFaceError(f"{name} is not in {file}, where {INDEX} in {str(folder)!r} places it")
        return weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        """Whether the folder holds a tensor."""
        return name in self._places

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises HuggingFaceError unless exactly these tensors are here, and with these shapes.

        A head beside a tied embedding may be there too: see `check_tie`.
        """
        missing = sorted(shapes.keys() - self._places.keys())
        surplus = sorted(
            name
            for name in self._places.keys() - shapes.keys()
            if name != _HEAD and not name.endswith(_IGNORED_SUFFIX)
        )
        for word, names in (("misses", missing), ("has, and the model has not,", surplus)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise HuggingFaceError(f"{str(self._folder)!r} {word} {', '.join(names[:3])}{more}")
        for name, shape in shapes.items():
            stored = self._slice(name)
            if tuple(stored.get_shape()) != shape:
                raise HuggingFaceError(f"{name} has shape {list(stored.get_shape())}, expected {list(shape)}")
            if stored.get_dtype() not in _DTYPES:
                raise HuggingFaceError(
                    f"{name} is {stored.get_dtype()}; weights must be float32, float16 or bfloat16"
                )

    def check_tie(self, spec: ParameterSpec, units: UnitRange, embedding: Tensor) -> None:
        """Raises HuggingFaceError where a head that is stored beside a tied embedding differs from it.

        Args:
            embedding: float32 [units, unit elements].
        """
        part = spec.parts[0]
        head = Part(_HEAD, part.offset, part.rows, part.size)
        values = torch.zeros(len(units), *spec.unit_shape)
        self._fill(values, spec, head, units)
        if not torch.equal(values.view(len(units), -1), embedding):
            raise HuggingFaceError(
                f"{_HEAD} in {str(self._folder)!r} differs from the embedding although the model ties them; "
                f"set model.tie_word_embeddings: false"
            )

    def units(self, spec: ParameterSpec, units: UnitRange) -> Tensor:
        """Some units of a parameter, float32 `[units, elements of a unit]`; padding is zero."""
        values = torch.zeros(len(units), *spec.unit_shape)
        for part in spec.parts:
            self._fill(values, spec, part, units)
        return values.view(len(units), -1)

    def _fill(self, values: Tensor, spec: ParameterSpec, part: Part, units: UnitRange) -> None:
        first, last = units.start * part.rows, min(units.stop * part.rows, part.size)
        stored = self._slice(part.logical_name)
        rows = stored[:, first:last].t() if part.transposed else stored[first:last]
        for row, piece in enumerate(rows.float().split(part.rows)):
            values[row, part.offset : part.offset + piece.shape[0]] = piece

    def _slice(self, name: str) -> Any:
        return self._file(self._places[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self._folder / name
            try:
                path.open("rb").close()  # safetensors takes every failure for a missing file
                self._files[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, ValueError, SafetensorError) as error:  # ValueError: a name with a NUL byte
                reason = getattr(error, "strerror", None) or str(error)
                raise HuggingFaceError(f"cannot read weights {str(path)!r}: {reason}") from None
        return self._files[name]


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of `config.json` and its counterpart; `default` is what Hugging Face means by a missing one."""

    theirs: str
    ours: str
    default: Any


class _Described(BaseModel):
    """The types of what is read of a `config.json`; null is as good as missing."""

    model_config = ConfigDict(strict=True)

    architectures: list[str] | None = None
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


_KEYS = (
    _Key("hidden_size", "hidden_size", None),
    _Key("intermediate_size", "intermediate_size", None),
    _Key("num_hidden_layers", "num_hidden_layers", None),
    _Key("num_attention_heads", "num_attention_heads", None),
    _Key("num_key_value_heads", "num_key_value_heads", None),
    _Key("head_dim", "head_dim", None),
    _Key("vocab_size", "vocab_size", None),
    _Key("rms_norm_eps", "rms_norm_eps", 1e-6),
    _Key("tie_word_embeddings", "tie_word_embeddings", False),
)


def check_model(folder: Path, model: ModelConfig) -> None:
    """Raises HuggingFaceError unless `config.json` says what `model` says."""
    theirs = model_settings(folder)
    ours = model.model_dump(mode="json")
    for key, value in theirs.items():
        if not _same(ours[key], value):
            raise HuggingFaceError(
                f"model.{key} is {json.dumps(ours[key])} in the config and {json.dumps(value)} in "
                f"{str(folder / CONFIG)!r}; set it to that"
            )


def _same(ours: object, theirs: object) -> bool:
    """Equality; of floats in float32, which is what both sides compute with."""
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return struct.pack("f", ours) == struct.pack("f", theirs)
    return ours == theirs


def model_settings(folder: Path) -> dict[str, Any]:
    """The settings of the section `model` that a folder's `config.json` decides.

    Raises HuggingFaceError for an architecture or a feature that is not known here.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise HuggingFaceError(
            f"{str(folder / CONFIG)!r}: model_type {kind!r} is not one of {', '.join(_ARCHITECTURES)}"
        )
    try:
        _Described.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise HuggingFaceError(f"{str(folder / CONFIG)!r}: {key}: {first['msg']}") from None
    for name in config.get("architectures") or [_ARCHITECTURES[kind]]:
        if name != _ARCHITECTURES[kind]:
            raise HuggingFaceError(f"{str(folder / CONFIG)!r}: architecture {name} is not known")
    for key, plain in _REFUSED.items():
        if config.get(key, plain) not in (plain, None):
            raise HuggingFaceError(f"{str(folder / CONFIG)!r}: {key}={config[key]!r} is not supported")
    settings = {key.ours: config.get(key.theirs, key.default) for key in _KEYS}
    settings["num_key_value_heads"] = settings["num_key_value_heads"] or settings["num_attention_heads"]
    settings["head_dim"] = settings["head_dim"] or settings["hidden_size"] // settings["num_attention_heads"]
    settings |= _rope_settings(folder, config)
    return settings | {"qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2"}


def _rope_settings(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_theta` beside `rope_scaling`, and `rope_parameters` with everything in it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {key: rope.get(key) for key in keys}
    elif kind != "default":
        raise HuggingFaceError(f"{str(folder / CONFIG)!r}: rope type {kind!r} is not supported")
    return {"rope_theta": theta, "rope_scaling": scaling}


def config_json(model: ModelConfig, positions: int, dtype: str) -> dict[str, Any]:
    """A `config.json` for a model that did not begin as a folder; HuggingFaceError where it has no name.

    Args:
        positions: the longest sequence that it was trained on.
        dtype: of the weights, such as `float32`.
    """
    if model.qk_norm and model.qkv_bias:
        raise HuggingFaceError("no Hugging Face architecture has both model.qk_norm and model.qkv_bias")
    kind = "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
    if kind == "qwen2" and model.head_dim * model.num_attention_heads != model.hidden_size:
        raise HuggingFaceError(f"Qwen2 has no head_dim of its own, found {model.head_dim}")
    scaling = model.rope_scaling
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[kind]], "model_type": kind}
    config |= {key.theirs: getattr(model, key.ours) for key in _KEYS}
    config |= {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling.model_dump()},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": positions,
        "initializer_range": model.initializer_range,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises HuggingFaceError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HuggingFaceError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise HuggingFaceError(f"{str(path)!r} is not JSON") from None
    if not isinstance(value, dict):
        raise HuggingFaceError(f"{str(path)!r} is not a JSON object")
    return value


def logical_tensors(spec: ParameterSpec, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and values of the Hugging Face tensors of a parameter, from its units [units, unit elements]."""
    shaped = stored.view(spec.units, *spec.unit_shape)
    for part in spec.parts:
        rows = shaped[:, part.offset : part.offset + part.rows].flatten(0, 1)[: part.size]
        yield part.logical_name, rows.t().contiguous() if part.transposed else rows
