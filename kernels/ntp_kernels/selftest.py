"""What a device must prove before it trains, and the fingerprint that two devices must share.

`cut_form` multiplies small random matrices cut at random places and compares the integers with
`integer_model.py`, bit for bit. Where they differ, the tensor core does not add as the biased chains need,
and the caller has to use the form `leaf` (and to say so: the bits are then those of `leaf`). It takes well
under a second once the kernels are compiled.

`fingerprint` hashes the outputs of fixed probes over all kernels. A kernel module takes part by defining
`probe(device) -> Iterable[Tensor]`; inputs come from `pattern`, never from a generator that a torch version
may change.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise

import numpy as np
import torch

from . import cut_scale, integer_model
from .cut import Form, cut_matmul

PROBED = ("selftest", "norm", "rope", "swiglu", "attention", "cross_entropy", "embedding", "adamw")
"""Modules of this package whose `probe` makes the fingerprint, in this order."""

_ROWS, _UNITS, _UNIT_ROWS, _COLUMNS = 32, 24, 16, 64
_LONG_UNITS = cut_scale.LONG_CONTRACTION // _UNIT_ROWS + 1
_CROSSING_UNIT = cut_scale.CROSSING * cut_scale.segment_units(_LONG_UNITS, _UNIT_ROWS)
"""The first unit of a long contraction behind a change of the chains' sign."""
_CUTS = ((0, 24), (0, 1, 24), (0, 7, 9, 24), (0, 5, 6, 13, 20, 24))


@dataclass(frozen=True)
class Verdict:
    """Which form of `cut_matmul` a device may use, and why."""

    form: Form
    reason: str


def cut_form(device: torch.device) -> Verdict:
    """Return `chain` where every cut of a random product adds up to the integer model's, else `leaf`.

    The units are the whole of a short contraction, then some of a long one, where chains change their sign.
    """
    a = pattern((_ROWS, _UNITS, _UNIT_ROWS), device, seed=1)
    w = pattern((_UNITS, _UNIT_ROWS, _COLUMNS), device, seed=2)
    a[:, 3, 5] *= 200  # one outlier channel: groups of very different size
    column = cut_scale.column_scale(w)
    for total, first in ((_UNITS, 0), (_LONG_UNITS, _CROSSING_UNIT - _UNITS // 2)):
        norms = torch.zeros(total, _ROWS, device=device)
        norms[first : first + _UNITS] = cut_scale.row_norms(a)
        row = cut_scale.row_scale(norms, _UNIT_ROWS)
        expected = _model_integers(a, w, row.bound, column, first)
        for cuts in _CUTS:
            integers = sum(
                cut_matmul(a[:, i:j].contiguous(), w[i:j], row, column, total, first + i).cpu().numpy()
                for i, j in pairwise(cuts)
            )
            if not np.array_equal(integers, expected):
                return Verdict("leaf", f"biased chains cut at units {cuts} differ from the integer model")
    return Verdict("chain", f"biased chains equal the integer model over {2 * len(_CUTS)} cuts")


def fingerprint(device: torch.device) -> str:
    """Return the SHA-256 of every probe's output bytes: equal on all devices that may train together."""
    digest = hashlib.sha256()
    for name in PROBED:
        module = import_module(f".{name}", __package__)
        for tensor in getattr(module, "probe", _no_probe)(device):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pattern(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Return fixed bf16 numbers in [-1, 1] of many magnitudes: squares of a Weyl sequence on the index."""
    count = int(np.prod(shape))
    weyl = (np.arange(count, dtype=np.uint64) * 2654435761 + seed * 40503) % (1 << 32)
    values = torch.from_numpy(weyl.astype(np.float64) / 2**31 - 1.0)
    return (values * values.abs()).to(torch.bfloat16).reshape(shape).to(device)


def probe(device: torch.device) -> Iterator[torch.Tensor]:
    """The GEMMs' share of the fingerprint."""
    from . import gemm

    x, w = pattern((48, 128), device, 3), pattern((3, 32, 128), device, 4)
    y = gemm.linear(x, w)
    out = torch.zeros(w.shape, dtype=torch.float32, device=device)
    gemm.linear_wgrad(y, x, out)
    row, column = gemm.row_scale(gemm.row_norms(y), 32), gemm.column_scale(w)
    total = gemm.cut_matmul(y, w, row, column, 3, form=cut_form(device).form)
    yield from (y, out, total, gemm.finish(total, row, column, 3, torch.bfloat16))


def _no_probe(device: torch.device) -> Iterable[torch.Tensor]:
    return ()


def _model_integers(
    a: torch.Tensor, w: torch.Tensor, row: torch.Tensor, column: torch.Tensor, first: int
) -> np.ndarray:
    """i32 [M, D] of the integer model: chains on either side of the crossing, with the floor's correction."""
    flat_a = a.float().cpu().numpy().reshape(a.shape[0], -1)
    flat_w = w.float().cpu().numpy().reshape(-1, w.shape[2])
    bound = row.cpu().numpy()[:, None] * column.cpu().numpy()[None, :]
    start = integer_model.chain_start(np.frexp(bound)[1] + 1)
    begin, end, crossing = (_UNIT_ROWS * unit for unit in (first, first + _UNITS, _CROSSING_UNIT))
    total = np.zeros_like(start, dtype=np.int32)
    for sign, k0, k1 in ((1, begin, min(crossing, end)), (-1, min(crossing, end), end)):
        part = slice(k0 - begin, k1 - begin)
        chain = integer_model.matmul(flat_a[:, part], np.ascontiguousarray(flat_w[part].T), sign * start)
        total += sign * (integer_model.chain_integer(chain) + 3 * k1 // 128 - 3 * k0 // 128)
    return total
