"""Tensors to files of pieces and back.

A *shard* is what one rank has, or wants, of one tensor. A file holds a rank's shards one after the other in
safetensors layout; a shard is checked in pieces of at most `PIECE_BYTES`, so that a rank that wants a part of
it reads and verifies little more.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ntp.checkpoint.manifest import ELEMENT_BYTES, DamagedError, FileRecord, Manifest, Piece
from ntp.checkpoint.threads import spread
from ntp.optim import DistributedOptimizer
from ntp.parameters import ParameterSpec
from ntp.units import UnitRange

PIECE_BYTES = 1 << 25
KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `[start, stop)` of `units` of a tensor; `values` is float32 `[units, stop - start]`."""

    tensor: str
    units: UnitRange
    start: int
    stop: int
    values: Tensor


def tensor_shapes(specs: Iterable[ParameterSpec]) -> dict[str, tuple[int, int]]:
    """Name and shape (units, elements of a unit) of every tensor of a checkpoint."""
    return {f"{spec.name}.{kind}": (spec.units, spec.unit_elements) for spec in specs for kind in KINDS}


def optimizer_shards(optimizer: DistributedOptimizer) -> list[Shard]:
    """This rank's slices of the optimizer's state, those included that another rank saves."""
    return [
        Shard(f"{part.spec.name}.{kind}", part.units, part.start, part.stop, part.of(flat))
        for part in optimizer.slices
        for kind, flat in zip(KINDS, optimizer.flats, strict=True)
    ]


def write_shards(path: Path, shards: Sequence[Shard]) -> tuple[FileRecord, list[Piece]]:
    """Write a file, wait until it is on the disk, and say what it holds. Raises OSError."""
    header = _header(shards)
    placed: list[tuple[Shard, int]] = []
    offset = len(header)
    for shard in shards:
        for part in _cut(shard):
            placed.append((part, offset))
            offset += part.values.numel() * ELEMENT_BYTES

    def write(part_at: tuple[Shard, int]) -> Piece:
        part, offset = part_at
        payload = part.values.contiguous().view(torch.uint8).numpy().reshape(-1).data
        _write_at(file.fileno(), payload, offset)
        digest = hashlib.sha256(payload).hexdigest()
        return Piece(part.tensor, path.name, offset, part.units, part.start, part.stop, digest)

    with path.open("wb") as file:
        _write_at(file.fileno(), memoryview(header), 0)
        pieces = spread(write, placed)
        os.fsync(file.fileno())
    return FileRecord(path.name, offset, len(header), hashlib.sha256(header).hexdigest()), pieces


def _write_at(descriptor: int, rest: memoryview, offset: int) -> None:
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def read_shards(checkpoint: Path, manifest: Manifest, shards: Iterable[Shard]) -> int:
    """Fill the `values` of shards from the pieces that overlap them; returns how many bytes were read.

    Raises DamagedError for a piece that cannot be read whole or has another checksum; then the values are
    undefined.
    """
    pieces = manifest.by_tensor()
    wanted: list[_Overlap] = []
    for shard in shards:
        found = [overlap for piece in pieces[shard.tensor] if (overlap := _overlap(piece, shard))]
        if sum(overlap.target.numel() for overlap in found) != shard.values.numel():
            raise DamagedError(f"the pieces of {shard.tensor} do not cover units {shard.units}")
        wanted += found

    def read(overlap: _Overlap) -> int:
        values = read_piece(checkpoint, overlap.piece)
        overlap.target.copy_(values[overlap.units, overlap.elements])
        return overlap.piece.bytes

    return sum(spread(read, wanted))


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The units and elements of a piece that belong into `target`, a part of a shard's values."""

    piece: Piece
    units: slice
    elements: slice
    target: Tensor


def _overlap(piece: Piece, shard: Shard) -> _Overlap | None:
    units = piece.units.intersect(shard.units)
    start, stop = max(piece.start, shard.start), min(piece.stop, shard.stop)
    if not units or start >= stop:
        return None
    target = shard.values[shard.units.local(units), start - shard.start : stop - shard.start]
    return _Overlap(piece, piece.units.local(units), slice(start - piece.start, stop - piece.start), target)


def read_tensor(checkpoint: Path, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor, float32 `[units, elements of a unit]`. Raises DamagedError."""
    units, elements = manifest.shapes[name]
    values = torch.empty(units, elements)
    read_shards(checkpoint, manifest, [Shard(name, UnitRange(0, units), 0, elements, values)])
    return values


def read_piece(checkpoint: Path, piece: Piece) -> Tensor:
    """The values of a piece, `[units, elements]`, verified. Raises DamagedError."""
    payload = bytearray(piece.bytes)
    try:
        with (checkpoint / piece.file).open("rb") as file:
            file.seek(piece.offset)
            found = file.readinto(payload)
    except OSError as error:
        raise DamagedError(f"{piece.file}: {error.strerror}") from None
    if found != piece.bytes:
        raise DamagedError(f"{piece.file} ends inside {piece.tensor}")
    if hashlib.sha256(payload).hexdigest() != piece.sha256:
        raise DamagedError(
            f"{piece.file}: the checksum of {piece.tensor}, units {piece.units.start} to "
            f"{piece.units.stop - 1}, does not fit"
        )
    return torch.frombuffer(payload, dtype=torch.float32).view(len(piece.units), -1)


def _cut(shard: Shard) -> Iterator[Shard]:
    """The shard in runs of units of at most `PIECE_BYTES`, a single unit at least."""
    rows = max(1, PIECE_BYTES // (ELEMENT_BYTES * (shard.stop - shard.start)))
    for first in range(0, len(shard.units), rows):
        values = shard.values[first : first + rows]
        units = UnitRange(shard.units.start + first, shard.units.start + first + len(values))
        yield Shard(shard.tensor, units, shard.start, shard.stop, values)


def _header(shards: Sequence[Shard]) -> bytes:
    """A safetensors header with the offsets by which torch.distributed.checkpoint finds a shard's place."""
    places = {shard.tensor: {"saved_offsets": [shard.units.start, shard.start]} for shard in shards}
    entries: dict[str, Mapping[str, object]] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    }
    offset = 0
    for shard in shards:
        size = shard.values.numel() * ELEMENT_BYTES
        entries[shard.tensor] = {
            "dtype": "F32",
            "shape": list(shard.values.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
