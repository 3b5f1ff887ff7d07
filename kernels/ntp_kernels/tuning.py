"""Which tile a GEMM of a given shape runs with: a table that ships, filled by `tuning_search.py`.

Tiles, stages and schedules are free because they move no bits (`tests/kernels/test_gemm_gpu.py` proves it
over every entry). `python -m ntp_kernels.tuning_search` times the candidates on the GPU at hand and rewrites
its table.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

Op = Literal["linear", "wgrad", "cut"]
Shape = tuple[int, int, int]
"""M, N, K: rows and columns of the output, contraction."""

TABLE = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True)
class Tile:
    """How a GEMM is cut up: `rows` x `columns` of the output per program, `depth` of k per step.

    kernel: `hopper` or `pingpong` (warp-specialised Gluon, see `gemm_hopper_kernels.py`) or `plain` (Triton's
    pipeliner); 192 rows have a third consumer. stages: steps in flight. split: pieces in which a tile is
    written. group: tile rows that run side by side. preload: pieces of the output that `wgrad` reads ahead.
    tail: column parts of the tiles of a last, incomplete round. warps, flatten: of `plain` only.
    """

    kernel: Literal["hopper", "pingpong", "plain"]
    rows: int
    columns: int
    depth: int = 64
    stages: int = 4
    split: int = 4
    group: int = 8
    warps: int = 8
    flatten: bool = False
    preload: int = 1
    tail: int = 1


PLAIN = Tile("plain", 128, 128, 64, stages=3, split=2, warps=8)
"""Runs on every card with TMA, in the interpreter and with every epilogue."""

_WIDE = Tile("hopper", 128, 256, split=8)
_TALL = Tile("hopper", 256, 128, split=8)
_SMALL = Tile("hopper", 128, 128, stages=6, split=4)
_AHEAD = replace(_WIDE, preload=4)
_TURNS = Tile("pingpong", 128, 128, stages=6, split=8)
CANDIDATES: dict[Op, tuple[Tile, ...]] = {
    "linear": (
        Tile("hopper", 128, 256),
        Tile("hopper", 256, 128),
        Tile("hopper", 128, 128, stages=6, split=2),
        Tile("hopper", 192, 128, split=2),
        Tile("hopper", 128, 256, tail=2),
        Tile("plain", 128, 256, split=2, flatten=True),
        Tile("plain", 128, 128, stages=5, split=2, flatten=True),
    ),
    "wgrad": (
        replace(_SMALL, preload=2),
        _AHEAD,
        replace(_AHEAD, group=16),
        replace(_AHEAD, tail=2),
        replace(_AHEAD, tail=4),
        Tile("hopper", 192, 128, split=4, preload=2),
    ),
    "cut": (_WIDE, _TALL, _SMALL, _TURNS, replace(_TURNS, group=16)),
}


@lru_cache(maxsize=4096)
def choose(op: Op, shape: Shape, card: str) -> Tile:
    """The tile of the entry nearest to `shape` in the table of `card`; without tables the first candidate."""
    entries = _entries(card).get(op, ())
    if not entries:
        return CANDIDATES[op][0]
    return min(entries, key=lambda entry: _distance(entry[0], shape))[1]


def entries(card: str) -> dict[Op, tuple[tuple[Shape, Tile], ...]]:
    """Every entry of a card's table."""
    return _entries(card)


@lru_cache(maxsize=8)
def _entries(card: str) -> dict[Op, tuple[tuple[Shape, Tile], ...]]:
    """A card without a table takes the first one: better than one tile for every shape."""
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return {
        op: tuple((tuple(entry["shape"]), Tile(**entry["tile"])) for entry in rows)
        for op, rows in tables.get(card, next(iter(tables.values()), {})).items()
    }


def _distance(left: Shape, right: Shape) -> float:
    """Sum of the ratios between two shapes' dimensions, the larger over the smaller."""
    return sum(max(a, b) / min(a, b) for a, b in zip(left, right, strict=True))


def record(card: str, tables: dict[Op, list[tuple[Shape, Tile]]]) -> None:
    """Replace a card's table."""
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known[card] = {
        op: [{"shape": shape, "tile": asdict(tile)} for shape, tile in rows] for op, rows in tables.items()
    }
    TABLE.write_text(json.dumps(known, separators=(",", ":")).replace('{"shape"', '\n{"shape"') + "\n")
