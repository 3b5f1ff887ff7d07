"""Initial weights: a pure function of (seed, parameter, unit, element), the same on every mesh and platform.

Each element takes one step of a Philox counter keyed by seed and parameter name: 256 bits, read as sixteen
16-bit integers whose sum is close to normal (Irwin-Hall: bounded at 6.9 standard deviations, excess kurtosis
-0.075). Everything up to the last multiplication is integer arithmetic, so there is no `log` or `cos` whose
last bit could depend on a library.
"""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ntp.parameters import ParameterSpec
from ntp.units import UnitRange

_LANES = 16
_THREADS = max(1, (os.cpu_count() or 1) // 8)  # eight ranks may share a host
_MEAN = _LANES * 65535 / 2
_STD = math.sqrt(_LANES * (65536**2 - 1) / 12)


def initial_units(spec: ParameterSpec, units: UnitRange, seed: int, std: float) -> Tensor:
    """Initial values of some units of a parameter, float32 `[units, unit_elements]`; padding is zero."""
    if spec.init == "normal":
        values = torch.empty(len(units), spec.unit_elements)

        def fill(row: int) -> None:
            values[row] = _normal(spec, units.start + row, seed, std)

        with ThreadPoolExecutor(_THREADS) as pool:  # numpy computes outside the interpreter's lock
            list(pool.map(fill, range(len(units))))
    else:
        values = torch.full((len(units), spec.unit_elements), float(spec.init == "ones"))
    return clear_padding(spec, units, values)


def clear_padding(spec: ParameterSpec, units: UnitRange, values: Tensor) -> Tensor:
    """Zero the rows of `values` `[units, unit_elements]` that belong to no logical tensor, in place."""
    shaped = values.view(len(units), *spec.unit_shape)
    for row, unit in enumerate(units):
        for part in spec.parts:
            real = min(part.rows, max(0, part.size - unit * part.rows))
            shaped[row, part.offset + real : part.offset + part.rows] = 0
    return values


def _normal(spec: ParameterSpec, unit: int, seed: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
    generator.advance(unit * spec.unit_elements)
    lanes = generator.random_raw(4 * spec.unit_elements).view(np.uint16).reshape(-1, _LANES)
    sums = lanes.sum(axis=1, dtype=np.int64)
    return torch.from_numpy(((sums - _MEAN) * (std / _STD)).astype(np.float32))
