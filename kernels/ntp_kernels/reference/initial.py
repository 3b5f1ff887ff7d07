"""Values close to normal, a pure function of key and position: what initial weights are made of.

A value takes one step of a Philox4x64-10 counter (Salmon et al. 2011, as numpy counts): 256 bits, read as
sixteen 16-bit integers whose sum is close to normal (Irwin-Hall: bounded at 6.9 standard deviations, excess
kurtosis -0.075). Everything up to the last multiplication is integer arithmetic, so there is no `log` or
`cos` whose last bit could depend on a library, and the Triton kernel has the same bits.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

_LANES = 16
_MEAN = _LANES * 65535 // 2
_PIECE = 1 << 16
_THREADS = max(1, (os.cpu_count() or 1) // 8)  # eight ranks may share a host


def fill_normal(out: torch.Tensor, key: bytes, first: int, scale: float) -> None:
    """Fill f32 out [n] with values `first` to `first + n` of the stream of `key`, 16 bytes.

    A value is a sum of integers, less its mean, times `scale` in float64, rounded once. The sum's standard
    deviation is `sqrt(16 * (65536^2 - 1) / 12)`.
    """

    def fill(start: int) -> None:
        piece = out[start : start + _PIECE]
        piece.copy_(torch.from_numpy(_sums(key, first + start, len(piece)) * scale))

    with ThreadPoolExecutor(_THREADS) as pool:  # numpy computes outside the interpreter's lock
        list(pool.map(fill, range(0, len(out), _PIECE)))


def _sums(key: bytes, first: int, count: int) -> np.ndarray:
    """Return i64 [count]: sums of sixteen integers, less their mean."""
    generator = np.random.Philox(key=np.frombuffer(key, dtype="<u8"))
    generator.advance(first)
    lanes = generator.random_raw(4 * count).view(np.uint16).reshape(count, _LANES)
    return lanes.sum(axis=1, dtype=np.int64) - _MEAN
