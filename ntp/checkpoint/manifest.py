"""The manifest: everything that is known of a checkpoint but the values themselves.

Its text carries its own digest, so that a manifest is either whole or refused.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ntp.errors import CheckpointError
from ntp.units import UnitRange

MANIFEST = "manifest.json"
FORMAT = 1
NUMERICS = 2
"""Raised by every change after which the same configuration and data give other bits."""

ELEMENT_BYTES = 4


class DamagedError(CheckpointError):
    """A checkpoint is incomplete or its bytes are not those that were written."""


def damage_of(checkpoint: Path | str, damage: DamagedError | str) -> str:
    """Damage, told with the checkpoint that it was found in."""
    return f"checkpoint {str(checkpoint)!r} is damaged ({damage})"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, stop)` of `units` of one tensor, float32, at `offset` of `file`."""

    tensor: str
    file: str
    offset: int
    units: UnitRange
    start: int
    stop: int
    sha256: str

    @property
    def elements(self) -> int:
        """How many numbers."""
        return len(self.units) * (self.stop - self.start)

    @property
    def bytes(self) -> int:
        """What they take on disk."""
        return self.elements * ELEMENT_BYTES

    def to_json(self) -> list[object]:
        """Plain values; `from_json` reads them back."""
        units = self.units
        return [
            self.tensor,
            self.file,
            self.offset,
            units.start,
            units.stop,
            self.start,
            self.stop,
            self.sha256,
        ]

    @classmethod
    def from_json(cls, values: list[Any]) -> Self:
        """What `to_json` wrote."""
        tensor, file, offset, first, last, start, stop, sha256 = values
        return cls(tensor, file, offset, UnitRange(first, last), start, stop, sha256)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of pieces: its size and the digest of the header before them."""

    name: str
    bytes: int
    header_bytes: int
    header_sha256: str

    def to_json(self) -> list[object]:
        """Plain values, in the order of the fields."""
        return [self.name, self.bytes, self.header_bytes, self.header_sha256]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: the last committed step; 0 = initial weights.
        config: the configuration of the run that saved it, as JSON values.
        shapes: tensor name -> (units, elements of a unit).
    """

    step: int
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, int]]
    files: tuple[FileRecord, ...]
    pieces: tuple[Piece, ...]
    numerics: int = NUMERICS

    def of_tensor(self, name: str) -> list[Piece]:
        """The pieces of one tensor."""
        return [piece for piece in self.pieces if piece.tensor == name]

    def by_tensor(self) -> dict[str, list[Piece]]:
        """Tensor name -> its pieces."""
        found: dict[str, list[Piece]] = {name: [] for name in self.shapes}
        for piece in self.pieces:
            found[piece.tensor].append(piece)
        return found

    def text(self) -> str:
        """What `manifest.json` holds."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "numerics": self.numerics,
            "config": self.config,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "files": [file.to_json() for file in self.files],
            "pieces": [piece.to_json() for piece in self.pieces],
        }
        return json.dumps({"sha256": _digest(body), "manifest": body}, indent=None) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder, its digest and its arithmetic checked.

    Raises DamagedError when it is missing, not whole or does not cover every tensor; CheckpointError when it
    is of another format.
    """
    try:
        outer = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        body, digest = outer["manifest"], outer["sha256"]
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is not whole") from None
    if _digest(body) != digest:
        raise DamagedError(f"{MANIFEST}: its checksum does not fit")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {str(checkpoint)!r} has format {body['format']}, expected {FORMAT}"
        )
    manifest = Manifest(
        step=body["step"],
        config=body["config"],
        shapes={name: (units, elements) for name, (units, elements) in body["shapes"].items()},
        files=tuple(FileRecord(*values) for values in body["files"]),
        pieces=tuple(Piece.from_json(values) for values in body["pieces"]),
        numerics=body["numerics"],
    )
    _check_cover(manifest)
    return manifest


def check_files(checkpoint: Path, manifest: Manifest) -> None:
    """Raises DamagedError for a file that is missing, has another size or another header."""
    for record in manifest.files:
        try:
            with (checkpoint / record.name).open("rb") as file:
                header = file.read(record.header_bytes)
                found = file.seek(0, 2)
        except OSError as error:
            raise DamagedError(f"{record.name}: {error.strerror}") from None
        if found != record.bytes:
            raise DamagedError(f"{record.name} has {found} bytes instead of {record.bytes}")
        if hashlib.sha256(header).hexdigest() != record.header_sha256:
            raise DamagedError(f"{record.name}: the checksum of its header does not fit")


def _check_cover(manifest: Manifest) -> None:
    held: Counter[str] = Counter()
    for piece in manifest.pieces:
        held[piece.tensor] += piece.elements
    wanted = {name: units * elements for name, (units, elements) in manifest.shapes.items()}
    if wanted != dict(held):
        wrong = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        raise DamagedError(f"{MANIFEST} does not hold every element of {wrong[0]} exactly once")


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
