"""Hashes of the whole state, in logical coordinates: the evidence that two runs computed the same bits.

`weights_sha256` covers every logical tensor in order of its name: name, shape, float32 master bytes.
`state_sha256` covers the same and both optimizer moments of each tensor. Tensors travel in chunks of rows, so
that no rank ever holds a whole sharded weight.
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ntp.collectives import Group
from ntp.optim import DistributedOptimizer, Slice
from ntp.parameters import ParameterSpec, Part

_CHUNK_ELEMENTS = 1 << 20
_AHEAD = 8
"""Chunks that wait to be hashed."""


@dataclass(frozen=True, slots=True)
class StateHashes:
    """Hex digests; both empty on every worker but the one that leads."""

    weights_sha256: str
    state_sha256: str


class _Digest:
    """SHA-256 in a thread of its own, beside another one and what brings the bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def update(self, payload: bytes | memoryview) -> None:
        """Take bytes that nobody changes any more."""
        self._pending.append(self._thread.submit(self._hash.update, payload))
        if len(self._pending) > _AHEAD:
            self._pending.popleft().result()

    def hexdigest(self) -> str:
        """Of all that came; nothing may come after."""
        while self._pending:
            self._pending.popleft().result()
        self._thread.shutdown()
        return self._hash.hexdigest()


def state_hashes(optimizer: DistributedOptimizer, world: Group) -> StateHashes:
    """Hash masters and moments; collective over the workers."""
    weights, state = _Digest(), _Digest()
    logical = [(part, spec) for spec in optimizer.buffer.specs for part in spec.parts]
    for part, spec in sorted(logical, key=lambda item: item[0].logical_name):
        header = f"{part.logical_name} {spec.logical_shape(part)}\n".encode()
        weights.update(header)
        state.update(header)
        for flat in optimizer.flats:
            for chunk in _logical_chunks(optimizer, world, spec, part, flat):
                if world.leads:
                    payload = chunk.cpu().view(-1).numpy().data
                    state.update(payload)
                    if flat is optimizer.master:
                        weights.update(payload)
    weights_sha256, state_sha256 = weights.hexdigest(), state.hexdigest()
    return StateHashes(weights_sha256, state_sha256) if world.leads else StateHashes("", "")


def _logical_chunks(
    optimizer: DistributedOptimizer, world: Group, spec: ParameterSpec, part: Part, flat: Tensor
) -> Iterator[Tensor]:
    """The bits of a logical tensor, some of its rows at a time, the same on every rank."""
    shape = spec.logical_shape(part)
    columns = math.prod(shape[1:])
    pieces = [
        _logical_piece(piece, part, flat) for piece in optimizer.slices if piece.spec is spec and piece.counts
    ]
    rows = max(1, _CHUNK_ELEMENTS // columns)
    for first in range(0, shape[0], rows):
        chunk = flat.new_zeros(min(rows, shape[0] - first), columns, dtype=torch.int32)
        for row, column, values in pieces:
            _paste(chunk, row - first, column, values.view(torch.int32))
        world.all_reduce(chunk)  # every element is non-zero on one rank at most: bits are kept
        yield chunk


def _logical_piece(piece: Slice, part: Part, flat: Tensor) -> tuple[int, int, Tensor]:
    """(first row, first column, values) of a slice in its logical tensor; elements of others are zero."""
    spec, units = piece.spec, piece.units
    dense = flat.new_zeros(len(units), spec.unit_elements)
    dense[:, piece.start : piece.stop] = piece.of(flat)
    rows = dense.view(len(units), spec.unit_shape[0], -1)[:, part.offset : part.offset + part.rows]
    stacked = rows.reshape(len(units) * part.rows, -1)
    first = units.start * part.rows
    stacked = stacked[: max(0, part.size - first)]
    return (0, first, stacked.T.contiguous()) if part.transposed else (first, 0, stacked)


def _paste(chunk: Tensor, row: int, column: int, values: Tensor) -> None:
    """Copy `values`, whose top left corner is at (`row`, `column`) of `chunk`, where they overlap."""
    top, bottom = max(row, 0), min(row + values.shape[0], chunk.shape[0])
    if top < bottom:
        chunk[top:bottom, column : column + values.shape[1]] += values[top - row : bottom - row]
