"""One data source as a flat array of token ids with document bounds.

Kinds of source, told apart by what the path is:

    the standard library    the `.py` files of the running interpreter, one document each
    directory               every `.txt` and `.jsonl` file below it, in order of relative path
    `name.jsonl`            one document per line, field "text"
    `name.npy`              1-D uint16 or uint32 token ids (memory-mapped); an end-of-document id ends
                            a document; after the last one it may be missing
    any other file          text, the whole file one document

Invariant: a corpus depends on the bytes of its files, their relative names and the tokenizer, on nothing
else. Empty documents are left out. The standard library of another Python version, patch versions included,
is another corpus.

Bytes need no tokenisation pass: they are kept as uint8. What a `tokenizer.json` produces can be cached in
`cache_dir` as a `.npy` of the kind above, named by the hash of the files and of the tokenizer; the processes
of one host take turns (a file lock), so that one tokenises and all of them map the same pages.

Left out: compressed and columnar files, and directories of `.npy` files (name each as a source of its own).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntp.errors import DataError
from ntp.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

SCAN_TOKENS = 1 << 22
"""How many tokens of a `.npy` are looked at together: bounds the memory that opening it takes."""

ENCODE_BYTES = 1 << 22
"""How much text goes to a tokenizer together: enough to use its threads, little beside the token array."""

NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Directories inside the standard library's that are not read: what is installed there, and tests."""


@dataclass(frozen=True)
class Corpus:
    """N documents of one source.

    `tokens` [T] unsigned integers; document d is `tokens[starts[d] : starts[d] + lengths[d]]` followed by
    `end_of_document`, which is not stored as part of it. `starts`, `lengths` int64 [N].
    """

    name: str
    tokens: NDArray[np.unsignedinteger]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    end_of_document: int

    @property
    def total(self) -> int:
        """Tokens in one pass over the corpus, end-of-document tokens included."""
        return int(self.lengths.sum()) + len(self.lengths)


def open_corpus(path: Path | None, tokenizer: Tokenizer, cache_dir: Path | None = None) -> Corpus:
    """The corpus at `path`, or the standard library's when `path` is None.

    `cache_dir`, made if missing, keeps token arrays of a `tokenizer.json` between runs; without it every
    process tokenises for itself.
    Errors: `DataError` when the source is missing, unreadable, malformed or empty.
    """
    name = "stdlib" if path is None else str(path)
    try:
        if path is not None and path.suffix == ".npy":
            corpus = _open_tokens(name, path, tokenizer)
        else:
            corpus = _open_text(name, path, tokenizer, cache_dir)
    except OSError as error:
        raise DataError(
            f"data source {name!r}: cannot read {error.filename or name!r} ({error.strerror})"
        ) from None
    if not len(corpus.lengths):
        raise DataError(f"data source {name!r} is empty: it holds no document with any text")
    return corpus


def split_held_out(corpus: Corpus, fraction: float) -> tuple[Corpus, Corpus]:
    """(training documents, held-out documents), about `fraction` of the documents in the second.

    The side is decided by a hash of the document's tokens alone: it depends neither on the seed nor on the
    other documents, and copies of one document fall on one side.
    """
    assert 0 <= fraction < 1
    held_out = np.zeros(len(corpus.starts), dtype=bool)
    for d, (start, length) in enumerate(zip(corpus.starts, corpus.lengths, strict=True)):
        digest = hashlib.blake2b(corpus.tokens[start : start + length].tobytes(), digest_size=8).digest()
        held_out[d] = int.from_bytes(digest, "little") < fraction * 2**64
    return _side(corpus, ~held_out, "for training"), _side(corpus, held_out, "held out")


def _side(corpus: Corpus, chosen: NDArray[np.bool_], side: str) -> Corpus:
    return replace(_select(corpus, chosen), name=f"{corpus.name} ({side}: {chosen.sum()} of {len(chosen)})")


def _select(corpus: Corpus, chosen: NDArray[np.bool_]) -> Corpus:
    return replace(corpus, starts=corpus.starts[chosen], lengths=corpus.lengths[chosen])


def _open_tokens(name: str, path: Path, tokenizer: Tokenizer) -> Corpus:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise DataError(
            f"data source {name!r} is not a .npy file of numbers, or only a part of one"
        ) from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        found = f"{tokens.dtype}{list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "an archive"
        raise DataError(
            f"data source {name!r} holds {found}; expected a 1-D array of uint16 or uint32 token ids"
        )
    return _from_tokens(name, tokens, tokenizer)


def _from_tokens(name: str, tokens: NDArray[np.unsignedinteger], tokenizer: Tokenizer) -> Corpus:
    """Find the documents of `tokens` [T], in chunks so that a mapped file is never in memory as a whole."""
    found, largest = [], -1
    for first in range(0, len(tokens), SCAN_TOKENS):
        chunk = np.asarray(tokens[first : first + SCAN_TOKENS])
        largest = max(largest, int(chunk.max()))
        found.append(np.flatnonzero(chunk == tokenizer.end_of_document) + first)
    if largest >= tokenizer.vocabulary_size:
        raise DataError(
            f"data source {name!r} holds token id {largest}, outside the tokenizer's vocabulary of "
            f"{tokenizer.vocabulary_size}; set data.tokenizer to the tokenizer that made the file"
        )
    ends = np.concatenate([*found, [len(tokens)]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    corpus = Corpus(name, tokens, starts, ends - starts, tokenizer.end_of_document)
    return _select(corpus, corpus.lengths > 0)


def _open_text(name: str, path: Path | None, tokenizer: Tokenizer, cache_dir: Path | None) -> Corpus:
    files = _standard_library() if path is None else _files(path)
    if isinstance(tokenizer, ByteTokenizer):
        return _from_bytes(name, files, tokenizer)
    if cache_dir is None:
        return _from_tokens(name, _tokenise(files, tokenizer), tokenizer)
    key = hashlib.sha256(f"{tokenizer.digest}\n{_digest(files)}".encode()).hexdigest()
    target = cache_dir / f"{key}.npy"
    _fill_cache(target, files, tokenizer)
    return replace(_open_tokens(str(target), target, tokenizer), name=name)


def _from_bytes(name: str, files: list[tuple[str, Path]], tokenizer: ByteTokenizer) -> Corpus:
    documents = [document for _, document in _documents(files)]
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    tokens = np.frombuffer(b"".join(documents), dtype=np.uint8)
    return Corpus(name, tokens, np.cumsum(lengths) - lengths, lengths, tokenizer.end_of_document)


def _standard_library() -> list[tuple[str, Path]]:
    """(relative name, path) of the standard library's modules, not of what builds of Python add to them."""
    files = _walk(Path(sysconfig.get_path("stdlib")), {".py"}, skip=NOT_STANDARD_LIBRARY)
    names = sys.stdlib_module_names
    return [(name, path) for name, path in files if name.split("/")[0].removesuffix(".py") in names]


def _files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [(path.name, path)]
    files = _walk(path, {".txt", ".jsonl"})
    if not files:
        raise DataError(f"data source {str(path)!r} is a directory without any .txt or .jsonl file")
    return files


def _walk(root: Path, suffixes: set[str], skip: frozenset[str] = frozenset()) -> list[tuple[str, Path]]:
    """(relative name, path) of the files below `root`, by name, outside directories in `skip` and linked
    ones."""

    def fail(error: OSError) -> None:
        raise error  # `os.walk` would leave an unreadable directory out, and so train on other data.

    found = []
    for directory, directories, names in os.walk(root, onerror=fail):
        directories[:] = [name for name in directories if name not in skip]
        found += [Path(directory, name) for name in names if Path(name).suffix in suffixes]
    return sorted((path.relative_to(root).as_posix(), path) for path in found)


def _documents(files: list[tuple[str, Path]]) -> Iterator[tuple[str, bytes]]:
    """(where it stands, content) of every document that is not empty."""
    for _, path in files:
        for where, document in _lines(path) if path.suffix == ".jsonl" else [(str(path), _whole(path))]:
            if document:
                yield where, document


def _whole(path: Path) -> bytes:
    document = path.read_bytes()
    # Catches compressed, columnar and UTF-16 files, on which a byte tokenizer would train happily.
    if b"\0" in document:
        raise DataError(f"data source {str(path)!r} is not text: byte {document.index(0)} is zero")
    return document


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The documents of a JSONL file. Blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _text_of(where, line)


def _text_of(where: str, line: bytes) -> bytes:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            return record["text"].encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"data source {where!r} is not a line of JSON: {error}") from None
    raise DataError(f'data source {where!r}: expected an object with a string "text", found {line[:60]!r}')


def _digest(files: list[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        with path.open("rb") as file:
            digest.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _tokenise(files: list[tuple[str, Path]], tokenizer: FileTokenizer) -> NDArray[np.unsignedinteger]:
    """All documents of `files` as one array of token ids, each document with its end-of-document id."""
    dtype = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    pieces: list[NDArray[np.unsignedinteger]] = [end[:0]]
    for texts in _batches(files):
        for ids in tokenizer.encode(texts):
            pieces += [ids.astype(dtype), end]
    return np.concatenate(pieces)


def _batches(files: list[tuple[str, Path]]) -> Iterator[list[str]]:
    """The documents of `files` as text, about `ENCODE_BYTES` of them together."""
    texts, size = [], 0
    for where, document in _documents(files):
        try:
            texts.append(document.decode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"data source {where!r} is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        size += len(document)
        if size >= ENCODE_BYTES:
            yield texts
            texts, size = [], 0
    yield texts


def _fill_cache(target: Path, files: list[tuple[str, Path]], tokenizer: FileTokenizer) -> None:
    """Write the token array of `files` to `target` unless it is there. A reader never sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.save(file, _tokenise(files, tokenizer))
        temporary.replace(target)
