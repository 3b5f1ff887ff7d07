"""Sequences against a model in plain Python: Philox from its paper, lists instead of arrays, no caches."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp.corpus import Corpus
from ntp.data import IGNORED, Dataset, open_datasets
from ntp.errors import DataError

END = 256
MASK = (1 << 64) - 1

quick = settings(max_examples=40, deadline=None)
documents_lists = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=1, max_size=8)
seeds = st.integers(0, MASK)


def flat(lists: list[list]) -> list:
    return list(itertools.chain.from_iterable(lists))


def corpus_of(documents: list[list[int]], name: str = "a") -> Corpus:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    tokens = np.array(flat(documents), dtype=np.uint8)
    return Corpus(name, tokens, np.cumsum(lengths) - lengths, lengths, END)


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011): four 64-bit words for a 256-bit counter."""
    c = [counter >> 64 * i & MASK for i in range(4)]
    k = list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [b >> 64 ^ c[1] ^ k[0], b & MASK, a >> 64 ^ c[3] ^ k[1], a & MASK]
        k = [k[0] + 0x9E3779B97F4A7C15 & MASK, k[1] + 0xBB67AE8584CAA73B & MASK]
    return c


def shuffled(count: int, seed: int, number: int, stream: int) -> list[int]:
    """range(count) sorted by Philox words; numpy's first block has counter 1."""
    words = [word for i in range(count) for word in philox((stream << 192) + i + 1, (seed, number))]
    return sorted(range(count), key=lambda i: words[i])


def model_inputs(documents: list[list[int]], length: int, seed: int, passes: int) -> list[list[list[int]]]:
    """Per pass, the inputs of the sequences that begin in it, in order."""
    stream, bounds = [], [0]
    for number in range(passes + 1):
        for d in shuffled(len(documents), seed, number, 0):
            stream += [*documents[d], END]
        bounds.append(len(stream))
    expected = []
    for number in range(passes):
        begins = [p for p in range(0, len(stream), length) if bounds[number] <= p < bounds[number + 1]]
        order = shuffled(len(begins), seed, number, 1)
        expected.append([stream[begins[i] : begins[i] + length] for i in order])
    return expected


@quick
@given(documents_lists, seeds, st.data())
def test_inputs_are_those_of_the_model(documents: list[list[int]], seed: int, data: st.DataObject) -> None:
    total = sum(len(document) + 1 for document in documents)
    length = data.draw(st.integers(1, total - 1))
    expected = flat(model_inputs(documents, length, seed, passes=3))
    dataset = Dataset([(corpus_of(documents), 1.0)], length, seed)
    assert [dataset.sequence(n).inputs.tolist() for n in range(len(expected))] == expected


@quick
@given(documents_lists, seeds, st.data())
def test_every_token_of_a_pass_is_an_input_once(
    documents: list[list[int]], seed: int, data: st.DataObject
) -> None:
    total = sum(len(document) + 1 for document in documents)
    length = data.draw(st.integers(1, total - 1))
    dataset = Dataset([(corpus_of(documents), 1.0)], length, seed)
    # As many passes as the length: then the passes end where a sequence ends.
    passes = length
    seen = np.concatenate([dataset.sequence(n).inputs for n in range(total)])
    once = np.bincount([END] * len(documents) + flat(documents), minlength=257)
    assert np.array_equal(np.bincount(seen, minlength=257), passes * once)


@quick
@given(documents_lists, seeds, st.data())
def test_targets_masks_and_positions_follow_from_the_document(
    documents: list[list[int]], seed: int, data: st.DataObject
) -> None:
    # Tokens are made to say what follows them, so that a target can be checked without the stream.
    marked, following = [], {}
    for document in documents:
        first = len(following)
        ids = list(range(first, first + len(document)))
        following |= dict(zip(ids, [*ids[1:], END], strict=True))
        marked.append(ids)
    if len(following) > 255:
        return
    total = sum(len(document) + 1 for document in marked)
    length = data.draw(st.integers(1, total - 1))
    dataset = Dataset([(corpus_of(marked), 1.0)], length, seed)
    for n in range(6):
        sequence = dataset.sequence(n)
        document, position = 0, 0
        for i, token in enumerate(sequence.inputs.tolist()):
            assert sequence.targets[i] == following.get(token, IGNORED)
            assert (sequence.documents[i], sequence.positions[i]) == (document, position)
            document, position = (document + 1, 0) if token == END else (document, position + 1)
        assert [a.dtype for a in vars(sequence).values()] == [np.int64, np.int64, np.int32, np.int32]


@quick
@given(st.permutations(range(24)), seeds)
def test_a_sequence_is_the_same_in_any_order_of_access(order: list[int], seed: int) -> None:
    sources = [(corpus_of([[1, 2, 3], [4] * 9, [5, 6]]), 2.0), (corpus_of([[7] * 5, [8] * 6], "b"), 1.0)]
    once, again = Dataset(sources, 5, seed), Dataset(sources, 5, seed)
    first = {n: once.sequence(n) for n in order}
    for n in range(24):
        for a, b in zip(vars(first[n]).values(), vars(again.sequence(n)).values(), strict=True):
            assert np.array_equal(a, b)


def test_every_pass_and_every_seed_has_an_order_of_its_own() -> None:
    documents = [[d] * 3 for d in range(50)]  # 200 tokens, 50 sequences of one document each

    def order(seed: int, number: int) -> tuple[int, ...]:
        dataset = Dataset([(corpus_of(documents), 1.0)], 4, seed)
        return tuple(int(dataset.sequence(50 * number + i).inputs[0]) for i in range(50))

    orders = {order(seed, number) for seed in range(3) for number in range(3)}
    assert len(orders) == 9
    assert all(sorted(once) == list(range(50)) for once in orders)


def test_two_sources_with_equal_documents_are_shuffled_apart() -> None:
    documents = [[d] * 3 for d in range(50)]
    dataset = Dataset([(corpus_of(documents), 1.0), (corpus_of(documents, "b"), 1.0)], 4, 0)
    firsts = [int(dataset.sequence(n).inputs[0]) for n in range(100)]
    assert sorted(firsts) == sorted([*range(50), *range(50)])
    assert firsts[::2] != firsts[1::2]


@quick
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 300))
def test_every_source_gets_its_share_of_the_sequences(weights: list[float], count: int) -> None:
    sources = [(corpus_of([[k] * 9], str(k)), weight) for k, weight in enumerate(weights)]
    dataset = Dataset(sources, 1, 0)
    drawn = [0] * len(weights)
    for n in range(count):
        inputs, targets = dataset.sequence(n).inputs, dataset.sequence(n).targets
        if inputs[0] != END:
            drawn[int(inputs[0])] += 1
        else:
            assert targets[0] == IGNORED
    for k, weight in enumerate(weights):
        # One token in ten of a source is its end-of-document id, which does not name the source.
        share = 0.9 * count * weight / sum(weights)
        assert abs(drawn[k] - share) <= len(weights) + 1


def test_the_sequences_of_a_source_are_taken_in_turn() -> None:
    documents = [[d] * 3 for d in range(20)]
    other = corpus_of([[99] * 7], "b")
    alone = Dataset([(corpus_of(documents), 1.0)], 4, 7)
    mixed = Dataset([(corpus_of(documents), 3.0), (other, 2.0)], 4, 7)
    ours = [s for n in range(100) if 99 not in (s := mixed.sequence(n).inputs.tolist())]
    assert ours == [alone.sequence(n).inputs.tolist() for n in range(60)]


def test_a_batch_joins_sequences_and_numbers_documents_through() -> None:
    dataset = Dataset([(corpus_of([[1, 2], [3, 4, 5], [6]]), 1.0)], 6, 0)
    numbers = [4, 0, 9]
    batch = dataset.batch(numbers)
    sequences = [dataset.sequence(n) for n in numbers]
    assert torch.equal(batch.inputs, torch.tensor(np.concatenate([s.inputs for s in sequences])))
    assert torch.equal(batch.targets, torch.tensor(np.concatenate([s.targets for s in sequences])))
    assert torch.equal(batch.positions, torch.tensor(np.concatenate([s.positions for s in sequences])))
    assert batch.target_tokens == int((batch.inputs != END).sum())
    steps = batch.documents.diff()
    assert bool(((steps == 0) | (steps == 1)).all())
    assert bool((steps[5::6] == 1).all())  # a new sequence is a new document
    assert torch.equal(batch.positions[1:] == 0, steps == 1)
    assert (batch.inputs.dtype, batch.documents.dtype) == (torch.int64, torch.int32)


def test_the_standard_library_is_the_default() -> None:
    data = open_datasets([], sequence_length=256, seed=0, held_out=0.05)
    batch = data.train.batch(range(64))
    assert batch.inputs.shape == (64 * 256,)
    assert {ord("\n"), ord(" "), ord("e")} <= set(batch.inputs.tolist())
    assert data.held_out is not None
    assert data.held_out.sequence(0).inputs.shape == (256,)


def test_held_out_sequences_do_not_depend_on_the_seed_and_share_no_document(tmp_path: Path) -> None:
    for d in range(40):
        (tmp_path / f"{d:02}.txt").write_bytes(bytes([d + 65]) * 7)
    one, two = (
        open_datasets([(str(tmp_path), 1.0)], sequence_length=8, seed=seed, held_out=0.3) for seed in (1, 2)
    )
    assert one.held_out is not None
    assert two.held_out is not None
    assert torch.equal(one.held_out.batch(range(20)).inputs, two.held_out.batch(range(20)).inputs)
    assert not torch.equal(one.train.batch(range(20)).inputs, two.train.batch(range(20)).inputs)
    trained, held_out = (set(d.batch(range(80)).inputs.tolist()) - {END} for d in (one.train, one.held_out))
    assert not trained & held_out
    assert trained | held_out == set(range(65, 105))


def test_a_source_that_is_too_short_is_named_with_its_size() -> None:
    with pytest.raises(DataError, match=r"'a' has 4 tokens in 1 document; train.seq_len=4 needs at least 5"):
        Dataset([(corpus_of([[1, 2, 3]]), 1.0)], 4, 0)


def test_one_document_cannot_be_split_in_two(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("once upon a time")
    with pytest.raises(DataError, match=r"one.txt \((held out|for training): 0 of 1\)' has 0 tokens"):
        open_datasets([(str(tmp_path / "one.txt"), 1.0)], sequence_length=4, seed=0, held_out=0.1)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_named(weight: float) -> None:
    with pytest.raises(DataError, match=f"'a' has weight {weight}"):
        Dataset([(corpus_of([[1, 2, 3]]), weight)], 2, 0)


def test_no_source_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data.source is None and data.path is empty"):
        open_datasets([], source=None, sequence_length=4, seed=0)
