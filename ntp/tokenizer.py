"""Tokenizers: bytes of a document in, token ids out.

Invariant: the end-of-document id marks the end of a document and nothing else. It is appended when documents
are packed (`ntp.data`), never produced from a document's text: text that spells a special token is encoded as
ordinary text. No beginning-of-document token is added, and truncation and padding that a `tokenizer.json` may
ask for are switched off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ntp.errors import DataError

END_OF_DOCUMENT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "[EOS]",
    "[SEP]",
)
"""Names of the end-of-document token of a `tokenizer.json`; the first that its vocabulary has is taken."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte is its own token; the end-of-document id is 256. Needs no file and no pass over the text."""

    vocabulary_size: int = 257
    end_of_document: int = 256


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizer.json`. `digest` identifies it and the version of the library that reads it (cache
    keys)."""

    path: Path
    model: tokenizers.Tokenizer
    vocabulary_size: int
    end_of_document: int
    digest: str

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The token ids of each text, without an end-of-document id. Empty text gives an empty array."""
        encodings = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: "byte", or the path of a `tokenizer.json`.

    Errors: `DataError` when the file is missing, is not a tokenizer, or has no end-of-document token.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer: cannot read {name!r} ({error.strerror}); "
            f"give 'byte' or the path of a tokenizer.json"
        ) from None
    model = _parse(path, content)
    digest = hashlib.sha256(f"tokenizers {tokenizers.__version__}\n".encode() + content).hexdigest()
    # Ids may have gaps, so the size is what an embedding needs, not the number of entries.
    vocabulary = model.get_vocab(with_added_tokens=True)
    end_of_document = _end_of_document(path, vocabulary)
    return FileTokenizer(path, model, max(vocabulary.values()) + 1, end_of_document, digest)


def check_vocabulary(tokenizer: Tokenizer, vocabulary_size: int) -> None:
    """Raise `DataError` when the tokenizer can produce an id that the model's vocabulary does not hold."""
    if tokenizer.vocabulary_size > vocabulary_size:
        raise DataError(
            f"model.vocab_size={vocabulary_size} is below the tokenizer's {tokenizer.vocabulary_size} ids; "
            f"set model.vocab_size to at least {tokenizer.vocabulary_size}"
        )


def _parse(path: Path, content: bytes) -> tokenizers.Tokenizer:
    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise DataError(f"data.tokenizer: {str(path)!r} is not a tokenizer.json: {reason}") from None
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    return model


def _end_of_document(path: Path, vocabulary: dict[str, int]) -> int:
    for token in END_OF_DOCUMENT_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"data.tokenizer: {str(path)!r} has no end-of-document token; "
        f"add one of {', '.join(END_OF_DOCUMENT_TOKENS)}"
    )
