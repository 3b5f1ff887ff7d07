"""The shipped table of tiles: readable, buildable on the card it names, and found by shape."""

import pytest
from ntp_kernels import tuning
from ntp_kernels.bench import shapes

CARD = "NVIDIA H100 80GB HBM3"
SHARED_MEMORY = 232448
OUTPUT_BYTES = {"linear": 2, "wgrad": 4, "cut": 4}


def shared_memory(op: str, tile: tuning.Tile) -> int:
    """Bytes of the ring and of two output buffers for each of two consumers."""
    ring = tile.stages * (tile.rows + tile.columns) * tile.depth * 2
    consumers = 2 if tile.kernel == "pingpong" else 1
    return ring + consumers * 2 * tile.rows * tile.columns // tile.split * OUTPUT_BYTES[op]


@pytest.mark.parametrize("op", ["linear", "wgrad", "cut"])
def test_every_entry_fits_the_card(op: tuning.Op) -> None:
    tiles = {tile for _, tile in tuning.entries(CARD)[op]} | set(tuning.CANDIDATES[op])
    for tile in tiles:
        if tile.kernel != "plain":
            assert shared_memory(op, tile) < SHARED_MEMORY - 1024, tile


@pytest.mark.parametrize("op", ["linear", "wgrad", "cut"])
def test_an_entry_is_found_by_its_own_shape(op: tuning.Op) -> None:
    for shape, tile in tuning.entries(CARD)[op]:
        assert tuning.choose(op, shape, CARD) == tile


def test_a_card_without_a_table_gets_the_first_one() -> None:
    shape, tile = tuning.entries(CARD)["wgrad"][0]
    assert tuning.choose("wgrad", shape, "another card") == tile


def test_every_bench_shape_has_an_entry() -> None:
    known = {shape for shape, _ in tuning.entries(CARD)["linear"]}
    assert known == {(shapes.TOKENS, weight.size, weight.hidden) for weight in shapes.weights()}


def test_shards_of_a_degree_differ_by_at_most_one_unit() -> None:
    sizes: dict[str, set[int]] = {}
    for weight in shapes.weights():
        sizes.setdefault(weight.name, set()).add(weight.units)
    assert all(max(units) - min(units) <= 1 for units in sizes.values())
