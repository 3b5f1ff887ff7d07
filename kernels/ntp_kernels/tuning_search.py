"""`python -m ntp_kernels.tuning_search`: time the candidate tiles at every bench shape and rewrite this
card's table."""

from collections.abc import Callable, Iterator

import torch

from . import gemm
from .bench.rows import interleaved
from .bench.shapes import TOKENS, Weight, weights
from .tuning import CANDIDATES, Op, Shape, Tile, record


def main() -> None:
    """Times the candidates at every shape of the bench and records the fastest as this card's."""
    tables: dict[Op, list[tuple[Shape, Tile]]] = {"linear": [], "wgrad": [], "cut": []}
    distinct = {(weight.size, weight.hidden): weight for weight in weights()}
    for weight in distinct.values():
        for op, shape, run in _calls(weight):
            tables[op].append((shape, _fastest(op, run)))
    record(
        torch.cuda.get_device_name(),
        {op: sorted(rows, key=lambda row: row[0]) for op, rows in tables.items()},
    )


def _calls(weight: Weight) -> Iterator[tuple[Op, Shape, Callable[[Tile], object]]]:
    """The three products of one local weight, as functions of the tile."""
    x = torch.randn(TOKENS, weight.hidden, device="cuda").bfloat16()
    a = torch.randn(TOKENS, weight.units, weight.rows, device="cuda").bfloat16()
    w = (torch.randn(weight.units, weight.rows, weight.hidden, device="cuda") * 0.02).bfloat16()
    out = torch.zeros(w.shape, device="cuda")
    row = gemm.row_scale(gemm.row_norms(a), weight.rows)
    column = gemm.column_scale(w)
    yield "linear", (TOKENS, weight.size, weight.hidden), lambda tile: gemm.linear(x, w, tile=tile)
    yield "wgrad", (weight.size, weight.hidden, TOKENS), lambda tile: gemm.linear_wgrad(a, x, out, tile=tile)
    yield (
        "cut",
        (TOKENS, weight.hidden, weight.size),
        lambda tile: gemm.cut_matmul(a, w, row, column, weight.total, weight.first, tile=tile),
    )


def _fastest(op: Op, run: Callable[[Tile], object]) -> Tile:
    """The first candidate, unless another one is faster by more than the noise."""
    tiles = CANDIDATES[op]
    times = interleaved([lambda tile=tile: run(tile) for tile in tiles], graphs=True)
    best = min(times)
    return tiles[0] if times[0] < 1.01 * best else tiles[times.index(best)]


if __name__ == "__main__":
    main()
