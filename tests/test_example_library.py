"""The example of library use: short, and it keeps the guarantee for a model that is not ours."""

import math
from pathlib import Path

import torch

from tests import example_library


def test_a_users_model_and_loop_compute_the_same_bits_with_failed_ranks():
    torch.set_num_threads(1)
    loss, digest = example_library.run(set())
    assert loss < 0.6 * math.log(example_library.CLASSES), "it learns"
    assert example_library.run({3}) == (loss, digest)
    assert example_library.run({1, 4, 5, 6}) == (loss, digest)
    assert len(digest) == 64


def test_the_example_is_short():
    assert len(Path(example_library.__file__).read_text(encoding="utf-8").splitlines()) < 80
