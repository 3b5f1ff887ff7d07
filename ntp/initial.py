"""Initial weights: a pure function of (seed, parameter, unit, element), the same on every mesh and platform.

Seed and parameter name are the key of a stream of values close to normal, in which unit after unit has its
elements (`ntp_kernels.reference.initial`). GPUs have the bits of the CPU.
"""

import hashlib
import math

import torch
from ntp_kernels import dispatch as kernels
from torch import Tensor

from ntp.parameters import ParameterSpec
from ntp.units import UnitRange

_STD = math.sqrt(16 * (65536**2 - 1) / 12)
"""Of the sixteen integers that `fill_normal` adds."""


def initial_units(
    spec: ParameterSpec, units: UnitRange, seed: int, std: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Initial values of some units of a parameter, float32 `[units, unit_elements]`; padding is zero.

    They are computed on `device`, in place: nothing else of their size is needed.
    """
    values = torch.empty(len(units), spec.unit_elements, device=device)
    if spec.init == "normal":
        key = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()[:16]
        kernels.fill_normal(values.view(-1), key, units.start * spec.unit_elements, std / _STD)
    else:
        values.fill_(float(spec.init == "ones"))
    return clear_padding(spec, units, values)


def clear_padding(spec: ParameterSpec, units: UnitRange, values: Tensor) -> Tensor:
    """Zero the rows of `values` `[units, unit_elements]` that belong to no logical tensor, in place."""
    shaped = values.view(len(units), *spec.unit_shape)
    for row, unit in enumerate(units):
        for part in spec.parts:
            real = min(part.rows, max(0, part.size - unit * part.rows))
            shaped[row, part.offset + real : part.offset + part.rows] = 0
    return values
