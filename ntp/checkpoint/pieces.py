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


def optimizer_shards(
    optimizer: DistributedOptimizer, flats: Sequence[Tensor] | None = None, once: bool = False
) -> list[Shard]:
    """This rank's slices of the optimizer's state.

    Args:
        flats: masters and moments to show instead of the optimizer's own (copies of them).
        once: leave out what another rank is to save.
    """
    flats = flats or (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq)
    return [
        Shard(f"{part.spec.name}.{kind}", part.units, part.start, part.stop, part.of(flat))
        for part in optimizer.slices
        if part.counts or not once
        for kind, flat in zip(KINDS, flats, strict=True)
    ]


def write_shards(path: Path, shards: Sequence[Shard]) -> tuple[FileRecord, list[Piece]]:
    """Write a file, wait until it is on the disk, and say what it holds. Raises OSError."""
    header = _header(shards)
    pieces: list[Piece] = []
    offset = len(header)
    with path.open("wb") as file:
        file.write(header)
        for shard in shards:
            for units, values in _cut(shard):
                payload = values.contiguous().view(torch.uint8).numpy().reshape(-1).data
                digest = hashlib.sha256(payload).hexdigest()
                file.write(payload)
                pieces.append(Piece(shard.tensor, path.name, offset, units, shard.start, shard.stop, digest))
                offset += len(payload)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, offset, len(header), hashlib.sha256(header).hexdigest()), pieces


def read_shards(checkpoint: Path, manifest: Manifest, shards: Iterable[Shard]) -> int:
    """Fill the `values` of shards from the pieces that overlap them; returns how many bytes were read.

    Raises DamagedError for a piece that cannot be read whole or has another checksum; then the values are
    undefined.
    """
    pieces = manifest.by_tensor()
    read = 0
    for shard in shards:
        filled = 0
        for piece in pieces[shard.tensor]:
            units = piece.units.intersect(shard.units)
            start, stop = max(piece.start, shard.start), min(piece.stop, shard.stop)
            if units and start < stop:
                values = read_piece(checkpoint, piece)
                source = values[piece.units.local(units), start - piece.start : stop - piece.start]
                target = shard.values[shard.units.local(units), start - shard.start : stop - shard.start]
                target.copy_(source)
                filled += source.numel()
                read += piece.bytes
        if filled != shard.values.numel():
            raise DamagedError(f"the pieces of {shard.tensor} do not cover units {shard.units}")
    return read


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


def _cut(shard: Shard) -> Iterator[tuple[UnitRange, Tensor]]:
    """The shard in runs of units of at most `PIECE_BYTES`, a single unit at least."""
    rows = max(1, PIECE_BYTES // (ELEMENT_BYTES * (shard.stop - shard.start)))
    for first in range(0, len(shard.units), rows):
        values = shard.values[first : first + rows]
        start = shard.units.start + first
        yield UnitRange(start, start + len(values)), values


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
