"""Failed GPUs as a user names them, turned into base-mesh ranks.

A base mesh has dp x tp ranks, TP fastest, then the standbys. A failed one is named by its rank (`3`), by its
coordinate (`dp=0/tp=3`), several with commas, or by `@file` with one name a line (`#` starts a comment). A
standby has no coordinate, only a rank. Naming one rank twice, in whatever spelling, is refused: a list with a
duplicate usually has a typing error where another rank should be.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from ntp.errors import TopologyError

_RANK = re.compile(r"[0-9]{1,9}")
_COORDINATE = re.compile(r"dp=([0-9]{1,9})/tp=([0-9]{1,9})")


def parse_failed(texts: Sequence[str], dp: int, tp: int, standbys: int) -> frozenset[int]:
    """Base-mesh ranks named by `texts` (the values of every `--failed`).

    Raises TopologyError, with the offending name, for one that cannot be parsed, lies outside the mesh or
    repeats a rank, for a file that cannot be read, and when no rank would be left.
    """
    world = dp * tp + standbys
    failed: dict[int, str] = {}
    for name in _names(texts):
        rank = _rank(name, dp, tp, world)
        if rank in failed:
            raise TopologyError(f"rank {name!r} is given twice (rank {rank}, first as {failed[rank]!r})")
        failed[rank] = name
    if len(failed) == world:
        raise TopologyError(
            f"all {world} ranks failed ({', '.join(failed.values())}): nothing is left to train on"
        )
    return frozenset(failed)


def read_rank_map(path: str) -> list[int]:
    """The process rank at each coordinate of the base mesh, standbys last: a JSON list in a file.

    Whether it is a permutation is for `parallel.rank_map` to say. Raises TopologyError.
    """
    try:
        value: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"cannot read rank map '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"rank map '{path}' is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, list):
        raise TopologyError(f"rank map '{path}': expected a list of ranks, found {str(value)[:60]!r}")
    for rank in cast("list[Any]", value):
        if type(rank) is not int:
            raise TopologyError(f"rank map '{path}': expected ranks, found {str(rank)[:60]!r}")
    return cast("list[int]", value)


def _names(texts: Sequence[str]) -> Iterator[str]:
    """Single names, in the order given."""
    for text in texts:
        if text.strip().startswith("@"):
            yield from _names_in_file(text.strip()[1:])
        else:
            yield from (name.strip() for name in text.split(","))


def _names_in_file(path: str) -> Iterator[str]:
    if not path:
        raise TopologyError("cannot read failed ranks from '@': expected @FILE")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TopologyError(f"cannot read failed ranks from '@{path}': {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TopologyError(f"cannot read failed ranks from '@{path}': {error.reason}") from None
    for line in lines:
        name = line.partition("#")[0].strip()
        if name:
            yield name


def _rank(name: str, dp: int, tp: int, world: int) -> int:
    """The rank that one name stands for, checked against the mesh."""
    if _RANK.fullmatch(name):
        rank = int(name)
        if rank >= world:
            raise TopologyError(f"rank {name!r} is out of range: the mesh has ranks 0 to {world - 1}")
        return rank
    coordinate = _COORDINATE.fullmatch(name)
    if coordinate is None:
        raise TopologyError(f"cannot parse rank {name!r}: expected 3, dp=0/tp=3 or @file")
    replica, position = int(coordinate[1]), int(coordinate[2])
    if replica >= dp or position >= tp:
        raise TopologyError(f"rank {name!r} is out of range: the mesh is dp={dp} x tp={tp}")
    return replica * tp + position
