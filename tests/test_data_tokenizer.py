"""Opening tokenizers and checking them against a model."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models

from ntp.errors import DataError
from ntp.tokenizer import END_OF_DOCUMENT_TOKENS, FileTokenizer, check_vocabulary, open_tokenizer


def saved(directory: Path, vocabulary: dict[str, int]) -> str:
    path = directory / "tokenizer.json"
    Model(models.WordLevel(vocabulary, unk_token="?")).save(str(path))
    return str(path)


def test_bytes_and_an_end_make_257_ids() -> None:
    tokenizer = open_tokenizer("byte")
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (257, 256)


@pytest.mark.parametrize("token", END_OF_DOCUMENT_TOKENS)
def test_the_end_of_document_token_is_found_by_name(tmp_path: Path, token: str) -> None:
    tokenizer = open_tokenizer(saved(tmp_path, {"?": 0, token: 1}))
    assert tokenizer.end_of_document == 1


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path: Path) -> None:
    assert open_tokenizer(saved(tmp_path, {"?": 0, "</s>": 41})).vocabulary_size == 42


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    first, again = (open_tokenizer(saved(tmp_path, {"?": 0, "</s>": 1})) for _ in range(2))
    other = open_tokenizer(saved(tmp_path, {"?": 1, "</s>": 0}))
    assert isinstance(first, FileTokenizer)
    assert isinstance(again, FileTokenizer)
    assert isinstance(other, FileTokenizer)
    assert first.digest == again.digest != other.digest


def test_a_vocabulary_that_the_model_does_not_hold_is_an_error() -> None:
    check_vocabulary(open_tokenizer("byte"), 257)
    with pytest.raises(DataError, match=r"model\.vocab_size=256 .* 257 ids"):
        check_vocabulary(open_tokenizer("byte"), 256)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read '.*absent.json' \(No such file"):
        open_tokenizer(str(tmp_path / "absent.json"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=r"'.*t.json' is not a tokenizer.json: ") as caught:
        open_tokenizer(str(tmp_path / "t.json"))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_of_document_token_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no end-of-document token; add one of <\|endoftext\|>"):
        open_tokenizer(saved(tmp_path, {"?": 0}))
