"""What each kind of source reads, how documents are split off, and what every malformed source says."""

import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers

from ntp.corpus import Corpus, open_corpus, split_held_out
from ntp.errors import DataError
from ntp.tokenizer import ByteTokenizer, open_tokenizer

BYTES = ByteTokenizer()


def tokenizer_file(directory: Path) -> str:
    """A tokenizer with one id per character of "abc ", 4 for anything else and 5 for end of document."""
    model = Model(models.WordLevel({"a": 0, "b": 1, "c": 2, " ": 3, "?": 4}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.add_special_tokens(["</s>"])
    model.enable_truncation(2)
    model.enable_padding(length=9)
    path = directory / "tokenizer.json"
    model.save(str(path))
    return str(path)


def documents(corpus: Corpus) -> list[list[int]]:
    bounds = zip(corpus.starts, corpus.lengths, strict=True)
    return [corpus.tokens[start : start + length].tolist() for start, length in bounds]


def texts(corpus: Corpus) -> list[bytes]:
    return [bytes(document) for document in documents(corpus)]


def test_the_standard_library_has_its_modules_but_no_tests_or_installed_packages() -> None:
    corpus = open_corpus(None, BYTES)
    found = set(texts(corpus))
    assert Path(re.__file__).read_bytes() in found
    assert Path(json.__file__).read_bytes() in found
    assert Path(pytest.__file__).read_bytes() not in found
    assert 2_000_000 < corpus.total < 40_000_000
    assert np.array_equal(corpus.tokens, open_corpus(None, BYTES).tokens)


def test_a_directory_is_read_in_order_of_relative_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("second")
    (tmp_path / "c.txt").write_text("third")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "é"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "d.md").write_text("not read")
    assert texts(open_corpus(tmp_path, BYTES)) == [b"first", "é".encode(), b"second", b"third"]


def test_any_other_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_bytes(b"one \xff document\n")
    assert texts(open_corpus(tmp_path / "notes.md", BYTES)) == [b"one \xff document\n"]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("scan", [1, 2, 100])
def test_end_of_document_ids_split_a_token_file(
    tmp_path: Path, dtype: type, scan: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntp.corpus.SCAN_TOKENS", scan)
    np.save(tmp_path / "t.npy", np.array([1, 2, 256, 256, 3, 256, 4], dtype=dtype))
    corpus = open_corpus(tmp_path / "t.npy", BYTES)
    assert documents(corpus) == [[1, 2], [3], [4]]
    assert corpus.total == 7
    assert isinstance(corpus.tokens, np.memmap)


@pytest.mark.parametrize("cached", [False, True])
def test_a_tokenizer_file_encodes_special_tokens_of_the_text_as_text(tmp_path: Path, cached: bool) -> None:
    tokenizer = open_tokenizer(tokenizer_file(tmp_path))
    (tmp_path / "t.jsonl").write_text('{"text": "abc abc"}\n{"text": "a</s>"}\n')
    corpus = open_corpus(tmp_path / "t.jsonl", tokenizer, tmp_path / "cache" if cached else None)
    assert documents(corpus) == [[0, 1, 2, 3, 0, 1, 2], [0, 4, 4, 4, 4]]
    assert (corpus.name, corpus.end_of_document) == (str(tmp_path / "t.jsonl"), 5)


def test_the_cache_is_filled_once_and_follows_content_and_tokenizer(tmp_path: Path) -> None:
    tokenizer, cache = open_tokenizer(tokenizer_file(tmp_path)), tmp_path / "cache"
    source = tmp_path / "t.txt"
    source.write_text("abc")
    open_corpus(source, tokenizer, cache)
    [first] = cache.glob("*.npy")
    written = first.stat().st_mtime_ns
    assert documents(open_corpus(source, tokenizer, cache)) == [[0, 1, 2]]
    assert first.stat().st_mtime_ns == written
    source.write_text("cba")
    assert documents(open_corpus(source, tokenizer, cache)) == [[2, 1, 0]]
    with Path(tokenizer_file(tmp_path)).open("a") as file:
        file.write("\n")
    open_corpus(source, open_tokenizer(str(tmp_path / "tokenizer.json")), cache)
    assert len(list(cache.glob("*.npy"))) == 3
    assert not list(cache.glob("*.tmp"))


def _documents_in_a_process(arguments: tuple[Path, Path]) -> list[list[int]]:
    directory, cache = arguments
    return documents(
        open_corpus(directory / "t.txt", open_tokenizer(str(directory / "tokenizer.json")), cache)
    )


def test_processes_that_start_together_share_one_cache_file(tmp_path: Path) -> None:
    tokenizer_file(tmp_path)
    (tmp_path / "t.txt").write_text("abc " * 5000)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(_documents_in_a_process, [(tmp_path, tmp_path / "cache")] * 2, chunksize=1)
    assert found == [[[0, 1, 2, 3] * 5000]] * 2
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1


def test_the_held_out_side_of_a_document_depends_on_its_content_alone(tmp_path: Path) -> None:
    lines = [f"document {d % 300}" for d in range(400)]

    def held_out(chosen: list[str], fraction: float) -> tuple[list[bytes], list[bytes]]:
        (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in chosen))
        train, away = split_held_out(open_corpus(tmp_path / "t.jsonl", BYTES), fraction)
        return texts(train), texts(away)

    train, away = held_out(lines, 0.25)
    assert sorted(train + away) == sorted(line.encode() for line in lines)
    assert not set(train) & set(away)
    assert 50 < len(away) < 150
    assert set(held_out(lines[:100], 0.25)[1]) == set(away) & {line.encode() for line in lines[:100]}
    assert set(away) <= set(held_out(lines, 0.5)[1])
    assert held_out(lines, 0.0) == ([line.encode() for line in lines], [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "cannot read '.*absent.txt' .No such file"),
        ("absent.npy", None, "cannot read '.*absent.npy' .No such file"),
        ("empty.txt", b"", "'.*empty.txt' is empty"),
        ("empty.jsonl", b"\n", "'.*empty.jsonl' is empty"),
        ("packed.txt", b"PK\3\4\0", "'.*packed.txt' is not text: byte 4 is zero"),
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b', "'.*cut.jsonl:2' is not a line of JSON"),
        (
            "list.jsonl",
            b'{"text": "a"}\n\n["b"]',
            "'.*list.jsonl:3': expected an object .* found b'\\[\"b\"\\]'",
        ),
        ("number.jsonl", b'{"text": 5}', "'.*number.jsonl:1': expected an object"),
        ("surrogate.jsonl", b'{"text": "\\ud800"}', "'.*surrogate.jsonl:1' is not a line of JSON"),
        ("deep.jsonl", b"[" * 100_000, "'.*deep.jsonl:1' is not a line of JSON"),
        ("text.npy", b"not an array", "'.*text.npy' is not a .npy file"),
        ("empty.npy", b"", "'.*empty.npy' is not a .npy file"),
    ],
)
def test_a_malformed_file_is_named_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(tmp_path / name, BYTES)
    assert "\n" not in str(caught.value)


def test_a_directory_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"is a directory without any \.txt or \.jsonl file"):
        open_corpus(tmp_path, BYTES)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[1]], np.uint16), r"holds uint16\[1, 1\]; expected a 1-D array"),
        (np.array([1, 2], np.int64), r"holds int64\[2\]; expected a 1-D array"),
        (np.array([1, 256, 300], np.uint16), "holds token id 300, outside the tokenizer's vocabulary of 257"),
        (np.array([], np.uint16), "is empty"),
        (np.array([256, 256], np.uint16), "is empty"),
    ],
)
def test_an_array_that_is_not_token_ids_is_an_error(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(DataError, match=message):
        open_corpus(tmp_path / "t.npy", BYTES)


def test_a_truncated_array_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros(100, np.uint16))
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:150])
    with pytest.raises(DataError, match=r"t.npy' is not a .npy file of numbers, or only a part of one"):
        open_corpus(tmp_path / "t.npy", BYTES)


def test_text_for_a_tokenizer_file_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"t.txt' is not UTF-8: invalid start byte at byte 2"):
        open_corpus(tmp_path / "t.txt", open_tokenizer(tokenizer_file(tmp_path)))
