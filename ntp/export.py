"""Weights out: a checkpoint as a folder that `transformers` loads.

The masters are written one parameter at a time, so that a model larger than memory can be exported. A model
that began as a Hugging Face folder keeps that folder's `config.json`, precision and tokenizer. All that is
read but the weights is read before the first file is written; an export that fails leaves nothing behind.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from ntp.checkpoint.load import resume_candidates
from ntp.checkpoint.manifest import DamagedError, Manifest, check_files, damage_of, read_manifest
from ntp.checkpoint.pieces import read_tensor
from ntp.config import ModelConfig
from ntp.errors import CheckpointError, HuggingFaceError
from ntp.hugging_face import CONFIG, INDEX, SINGLE, config_json, logical_tensors, read_json
from ntp.parameters import parameter_specs
from ntp.run_directory import check_run
from ntp.tokenizer import ByteTokenizer
from ntp.yaml_text import load_mapping

FILE_BYTES = 5 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNFINISHED = ".unfinished"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def export(run_dir: Path, out: Path, step: int | None = None, dtype: str | None = None) -> tuple[int, str]:
    """Write a checkpoint of a run to the folder `out`, which must be new or empty.

    Args:
        step: of the checkpoint; None = the newest that is sound.
        dtype: of the weights; None = that of the folder which the run began with, else float32.

    Returns:
        The step that was exported and the dtype.

    Raises:
        RunError, CheckpointError, HuggingFaceError: `run_dir` is none; no sound checkpoint; `out` is in use
            or cannot be made; the source folder is gone.
    """
    checkpoint, manifest = _sound_checkpoint(run_dir, step)
    model, tokenizer, seq_len = _what_was_trained(checkpoint, manifest)
    source = Path(model.init_from) if model.init_from else None
    settings = read_json(source / CONFIG) if source else None
    dtype = dtype or _dtype_of(settings)
    settings = settings or config_json(model, seq_len, dtype)
    key = "dtype" if "dtype" in settings else "torch_dtype"
    files = _tokenizer_files(tokenizer, source) | {CONFIG: _json(settings | {key: dtype})}
    with _filling(out) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        _write_weights(folder, _tensors(checkpoint, manifest, model, DTYPES[dtype]))
    return manifest.step, dtype


@contextmanager
def _filling(out: Path) -> Iterator[Path]:
    """A folder inside `out` whose files become those of `out` at the end; where that fails nothing stays."""
    is_new = not out.exists()
    if not is_new and (not out.is_dir() or any(path.name != _UNFINISHED for path in out.iterdir())):
        raise HuggingFaceError(f"{str(out)!r} exists already and is not an empty folder; name a new one")
    folder = out / _UNFINISHED
    try:
        if folder.exists():  # an export was killed
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        yield folder
        for path in folder.iterdir():
            path.rename(out / path.name)
        folder.rmdir()
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).partition(" (os error")[0].split())
        raise HuggingFaceError(f"cannot write {str(out)!r}: {reason}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # not empty, where all went well
                out.rmdir()


def _sound_checkpoint(run_dir: Path, step: int | None) -> tuple[Path, Manifest]:
    """The newest checkpoint whose manifest and files are whole; the values are verified as they are read."""
    check_run(run_dir)
    section = load_mapping(run_dir / "resolved.yaml").get("checkpoint")
    place = section.get("dir") if isinstance(section, dict) else None
    directory = Path(place) if isinstance(place, str) else run_dir / "checkpoints"
    candidates, _ = resume_candidates("auto" if step is None else str(step), directory)
    refusal: CheckpointError | None = None
    for path in candidates if step is None else candidates[:1]:
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
            return path, manifest
        except DamagedError as damage:
            refusal = refusal or CheckpointError(damage_of(path, damage))
    raise refusal or CheckpointError(f"no checkpoint in {str(directory)!r}; {_where_some_are(directory)}")


def _where_some_are(directory: Path) -> str:
    earlier = sorted(str(path) for path in directory.glob("earlier-*"))
    if earlier:
        return f"those of earlier runs lie in {', '.join(earlier)}"
    return "a run saves some where checkpoint.every is set"


def _what_was_trained(checkpoint: Path, manifest: Manifest) -> tuple[ModelConfig, str, int]:
    """The model, the name of its tokenizer and the length of its sequences.

    The rest of the configuration is not looked at: a later version may want it otherwise.
    """
    config = manifest.config
    try:
        model = ModelConfig.model_validate_json(json.dumps(config["model"]))
        return model, config["data"]["tokenizer"], config["train"]["seq_len"]
    except (ValidationError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {str(checkpoint)!r} is of an unknown model: {reason}") from None


def _dtype_of(settings: Mapping[str, Any] | None) -> str:
    dtype = str((settings or {}).get("dtype") or (settings or {}).get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise HuggingFaceError(f"cannot write dtype {dtype!r}; give one of {', '.join(DTYPES)}")
    return dtype


def _tensors(
    checkpoint: Path, manifest: Manifest, model: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for spec in parameter_specs(model):
        try:
            stored = read_tensor(checkpoint, manifest, f"{spec.name}.master")
        except DamagedError as damage:
            raise CheckpointError(damage_of(checkpoint, damage)) from None
        for name, values in logical_tensors(spec, stored):
            yield name, values.to(dtype).contiguous()


def _write_weights(out: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """One file, or several of at most `FILE_BYTES` with an index."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(pending, out / _part(len(shards) + 1), metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, values in tensors:
        total += values.nbytes
        if pending and sum(t.nbytes for t in pending.values()) + values.nbytes > FILE_BYTES:
            flush()
        pending[name] = values
    flush()
    if len(shards) == 1:
        (out / _part(1)).rename(out / SINGLE)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (out / _part(number)).rename(out / file)
        places |= dict.fromkeys(names, file)
    (out / INDEX).write_bytes(_json({"metadata": {"total_size": total}, "weight_map": places}))


def _part(number: int) -> str:
    return f"model-{number:05d}.safetensors.part"


def _tokenizer_files(tokenizer: str, source: Path | None) -> dict[str, bytes]:
    """Those of the source folder, else of the run's tokenizer; bytes become a tokenizer too."""
    if source is None and tokenizer == "byte":
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        text = byte_tokenizer().to_str(pretty=True)
        return {_TOKENIZER: text.encode(), "tokenizer_config.json": _json(settings)}
    folder = source or Path(tokenizer).parent
    try:
        found = {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).exists()}
        return found if source else found | {_TOKENIZER: Path(tokenizer).read_bytes()}
    except OSError as error:
        raise HuggingFaceError(f"cannot read {str(error.filename)!r}: {error.strerror}") from None


def byte_tokenizer() -> Tokenizer:
    """The byte tokenizer as a `tokenizer.json`: token `b` is byte `b`, 256 ends a document."""
    letters = _byte_letters()
    end = ByteTokenizer().end_of_document
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == end
    return tokenizer


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be printed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + place) for place, b in enumerate(hidden)}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
