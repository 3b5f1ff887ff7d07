"""Training sequences as a pure function of (data, seed, position).

Sequence number n of a run (n = step * global_batch + index) is computed from n alone: there is no iterator,
so there is nothing to checkpoint, and replaying or re-assigning a microbatch after a failure asks for its
numbers again.

How tokens become sequences, for one source:

- A *pass* puts all documents in a shuffled order, each followed by its end-of-document id, one after the
  other. The passes, each with an order of its own, make one endless stream, cut into sequences of
  `sequence_length` (L). A sequence belongs to the pass in which it begins; the last one of a pass runs on
  into the next pass. So every token of a pass is an input exactly once.
- The sequences of a pass are handed out in shuffled order, or a long document would fill a whole batch.
- The target of a token is the next token of its document, also across a cut; the end-of-document id is a
  target like any other. The position that holds it has target `IGNORED`.
- Attention stays inside a document: `documents` counts the documents of the sequence from 0, and `positions`
  counts from 0 where a document starts or where the sequence starts, also in the middle of a document.

Orders come from raw Philox words sorted stably; both are fixed by definition, where numpy's own `permutation`
may change between versions. Several sources are mixed by weight, exactly: among the first n sequences each
source has its share to within a fixed number of sequences (`_locate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ntp.config import Config
from ntp.corpus import Corpus, open_corpus, split_held_out
from ntp.errors import DataError
from ntp.tokenizer import Tokenizer, open_tokenizer

IGNORED = -100
"""Target of a position that predicts nothing."""


@dataclass(frozen=True)
class PackedSequence:
    """One sequence of L tokens: `inputs`, `targets` int64 [L]; `documents`, `positions` int32 [L]."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int32]
    positions: NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """The sequences of a microbatch one after the other, M = sequences * L tokens.

    `inputs`, `targets` int64 [M]; `documents`, `positions` int32 [M]. Documents are numbered from 0 through
    the whole batch and never fall. `target_tokens` is the number of targets that are not `IGNORED`.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    target_tokens: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return Batch(
            inputs, targets, self.documents.to(device), self.positions.to(device), self.target_tokens
        )


@dataclass(frozen=True)
class Datasets:
    """What a run reads: `held_out` is None unless documents are held out."""

    train: Dataset
    held_out: Dataset | None
    tokenizer: Tokenizer


class Dataset:
    """Sequences of length L over weighted sources; equal arguments give equal sequences in every process.

    Errors: `DataError` when a source has fewer than L + 1 tokens or a weight is not a positive number.
    """

    def __init__(self, sources: Sequence[tuple[Corpus, float]], sequence_length: int, seed: int) -> None:
        assert sources, "a dataset has at least one source"
        assert sequence_length > 0
        assert 0 <= seed < 1 << 64
        self._streams = [_Stream(c, sequence_length, seed, k) for k, (c, _) in enumerate(sources)]
        self._shares = _shares(sources)

    def sequence(self, number: int) -> PackedSequence:
        """Sequence `number` >= 0 of the run."""
        source, index = _locate(number, self._shares)
        return self._streams[source].sequence(index)

    def batch(self, numbers: Iterable[int]) -> Batch:
        """The sequences with these numbers, in this order, at least one."""
        sequences = [self.sequence(number) for number in numbers]
        first_document, documents = 0, []
        for sequence in sequences:
            documents.append(sequence.documents + np.int32(first_document))
            first_document = int(documents[-1][-1]) + 1
        targets = np.concatenate([sequence.targets for sequence in sequences])
        return Batch(
            inputs=torch.from_numpy(np.concatenate([sequence.inputs for sequence in sequences])),
            targets=torch.from_numpy(targets),
            documents=torch.from_numpy(np.concatenate(documents)),
            positions=torch.from_numpy(np.concatenate([sequence.positions for sequence in sequences])),
            target_tokens=int(np.count_nonzero(targets != IGNORED)),
        )


def datasets_of(config: Config, cache_dir: Path | None = None) -> Datasets:
    """Open what the `data` section of a configuration names, as `open_datasets` does."""
    data, train = config.data, config.train
    return open_datasets(
        [(path.path, path.weight) for path in data.path or ()],
        source=data.source,
        tokenizer=data.tokenizer,
        held_out=data.held_out,
        sequence_length=train.seq_len,
        seed=train.seed,
        cache_dir=cache_dir,
    )


def open_datasets(
    paths: Sequence[tuple[str, float]],
    *,
    source: str | None = "stdlib",
    tokenizer: str = "byte",
    held_out: float = 0.0,
    sequence_length: int,
    seed: int,
    cache_dir: Path | None = None,
) -> Datasets:
    """Open the (path, weight) sources, or `source` when there are none, and split them.

    `held_out` is the fraction of documents kept for evaluation. Their order does not depend on `seed`, so
    that the evaluations of two runs read the same sequences: 0, 1, 2, ... of `Datasets.held_out`.
    Errors: `DataError` as `open_tokenizer`, `open_corpus` and `Dataset` raise it.
    """
    opened = open_tokenizer(tokenizer)
    if not paths and source != "stdlib":
        raise DataError(
            f"data.source is {source!r} and data.path is empty; give a path, or set source to 'stdlib'"
        )
    corpora = [(open_corpus(Path(path), opened, cache_dir), weight) for path, weight in paths]
    corpora = corpora or [(open_corpus(None, opened, cache_dir), 1.0)]
    if held_out == 0:
        return Datasets(Dataset(corpora, sequence_length, seed), None, opened)
    splits = [(split_held_out(corpus, held_out), weight) for corpus, weight in corpora]
    train = Dataset([(kept, weight) for (kept, _), weight in splits], sequence_length, seed)
    return Datasets(train, Dataset([(away, w) for (_, away), w in splits], sequence_length, seed=0), opened)


@dataclass(frozen=True)
class _Pass:
    """The order of one pass, int64 arrays.

    `documents` [N] as they come, their `bounds` [N + 1] in the pass, and the `sequences` that begin in it:
    their places in the stream, in the order in which they are handed out.
    """

    documents: NDArray[np.int64]
    bounds: NDArray[np.int64]
    sequences: NDArray[np.int64]


class _Stream:
    """The endless stream of one source and its cut into sequences. Keeps the latest passes' orders."""

    def __init__(self, corpus: Corpus, length: int, seed: int, source: int) -> None:
        documents = len(corpus.lengths)
        if corpus.total < length + 1:
            raise DataError(
                f"data source {corpus.name!r} has {corpus.total} tokens in {documents} "
                f"document{'s' * (documents != 1)}; train.seq_len={length} needs at least {length + 1} tokens"
            )
        self._corpus, self._length, self._seed, self._source = corpus, length, seed, source
        self._total = corpus.total
        self._passes: dict[int, _Pass] = {}

    def sequence(self, index: int) -> PackedSequence:
        """Sequence `index` of this source in the order they are handed out."""
        number = index * self._length // self._total  # of the pass in which sequence `index` begins
        chosen = self._pass(number).sequences[index - self._first_sequence(number)]
        return _pack(self._read(int(chosen) * self._length, self._length + 1), self._corpus.end_of_document)

    def _first_sequence(self, number: int) -> int:
        """The first sequence that begins in pass `number` or later."""
        return -(-number * self._total // self._length)

    def _pass(self, number: int) -> _Pass:
        if number not in self._passes:
            self._passes = {n: order for n, order in self._passes.items() if abs(n - number) == 1}
            self._passes[number] = self._order(number)
        return self._passes[number]

    def _order(self, number: int) -> _Pass:
        # One counter range per (source, what is ordered): the words never overlap.
        documents = _permutation(len(self._corpus.lengths), (self._seed, number), 2 * self._source)
        bounds = np.concatenate([[0], np.cumsum(self._corpus.lengths[documents] + 1)])
        first, last = self._first_sequence(number), self._first_sequence(number + 1)
        sequences = first + _permutation(last - first, (self._seed, number), 2 * self._source + 1)
        return _Pass(documents, bounds, sequences)

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens [first, first + count) of the stream, at most one pass's worth of them."""
        number, offset = divmod(first, self._total)
        head = self._read_pass(number, offset, min(offset + count, self._total))
        if len(head) == count:
            return head
        return np.concatenate([head, self._read_pass(number + 1, 0, count - len(head))])

    def _read_pass(self, number: int, first: int, last: int) -> NDArray[np.int64]:
        """Tokens [first, last) of pass `number`."""
        corpus, order = self._corpus, self._pass(number)
        out = np.full(last - first, corpus.end_of_document, dtype=np.int64)
        place = int(np.searchsorted(order.bounds, first, side="right")) - 1
        while place < len(order.documents) and (begin := int(order.bounds[place])) < last:
            document = order.documents[place]
            low, high = max(first, begin), min(last, begin + int(corpus.lengths[document]))
            source = int(corpus.starts[document]) - begin
            if low < high:
                out[low - first : high - first] = corpus.tokens[source + low : source + high]
            place += 1
        return out


def _pack(tokens: NDArray[np.int64], end_of_document: int) -> PackedSequence:
    """Inputs and targets from L + 1 consecutive tokens of the stream, the last of which is only a target."""
    inputs = tokens[:-1]
    ends = inputs == end_of_document
    starts = np.concatenate([[True], ends[:-1]])
    place = np.arange(len(inputs))
    return PackedSequence(
        inputs=inputs.copy(),
        targets=np.where(ends, IGNORED, tokens[1:]),
        documents=(np.cumsum(starts) - 1).astype(np.int32),
        positions=(place - np.maximum.accumulate(np.where(starts, place, 0))).astype(np.int32),
    )


def _permutation(count: int, key: tuple[int, int], stream: int) -> NDArray[np.int64]:
    """A shuffled order of range(count), a function of `key` (seed, pass) and `stream`."""
    words = np.random.Philox(
        key=np.array(key, dtype=np.uint64), counter=np.array([0, 0, 0, stream], dtype=np.uint64)
    )
    return np.argsort(words.random_raw(count), kind="stable")


def _shares(sources: Sequence[tuple[Corpus, float]]) -> list[Fraction]:
    """The share of each source among itself and those after it, so that the last is 1."""
    for corpus, weight in sources:
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"data source {corpus.name!r} has weight {weight}; a weight is a positive number")
    weights = [Fraction(weight) for _, weight in sources]
    return [weight / sum(weights[k:]) for k, weight in enumerate(weights)]


def _locate(number: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """(source, index in that source) of sequence `number`.

    A source with share s of a stream takes the elements n where floor((n + 1) s) steps; the rest, renumbered,
    are the stream of the sources after it. Exact, so a source gives its sequences in turn, none left out.
    """
    assert number >= 0
    for source, share in enumerate(shares):
        taken = math.floor(number * share)
        if math.floor((number + 1) * share) > taken:
            return source, taken
        number -= taken
    raise AssertionError("the last share is 1")
