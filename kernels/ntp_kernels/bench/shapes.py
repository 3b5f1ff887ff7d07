"""The matrix products of Llama-3-8B and 70B at tensor parallelism 1 to 8, unequal shards included.

Units are never split: KV groups, and FFN units of 128 columns; shards differ by at most one unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

TOKENS = 8192
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8)
_FFN_UNIT = 128


@dataclass(frozen=True)
class Model:
    """Widths of one model, in elements; `head` is the size of a head."""

    name: str
    hidden: int
    query_heads: int
    kv_heads: int
    head: int
    ffn: int


@dataclass(frozen=True)
class Weight:
    """The local part of one weight: `units` of `rows` rows from `first` of `total`."""

    name: str
    hidden: int
    rows: int
    first: int
    units: int
    total: int

    @property
    def size(self) -> int:
        """Local rows."""
        return self.units * self.rows

    @property
    def column_parallel(self) -> bool:
        """Whether ranks hold its outputs, and not its inputs."""
        return self.name.split()[1] in ("qkv", "gate_up")


MODELS = (Model("8B", 4096, 32, 8, 128, 14336), Model("70B", 8192, 64, 8, 128, 28672))


def weights() -> list[Weight]:
    """Every distinct local shape: for each shard size, the shard that crosses most segment borders."""
    found: dict[tuple[str, int], Weight] = {}
    for weight in _all():
        found.setdefault((weight.name, weight.units), weight)
    return list(found.values())


def _all() -> Iterator[Weight]:
    for model in MODELS:
        group = model.query_heads // model.kv_heads
        kinds = (
            ("qkv", model.kv_heads, (group + 2) * model.head),
            ("o", model.kv_heads, group * model.head),
            ("gate_up", model.ffn // _FFN_UNIT, 2 * _FFN_UNIT),
            ("down", model.ffn // _FFN_UNIT, _FFN_UNIT),
        )
        for name, total, rows in kinds:
            for degree in DEGREES:
                bounds = [total * rank // degree for rank in range(degree + 1)]
                for first, end in reversed(list(pairwise(bounds))):
                    yield Weight(
                        f"{model.name} {name} tp{degree}", model.hidden, rows, first, end - first, total
                    )
