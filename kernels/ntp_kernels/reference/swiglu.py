"""SwiGLU on the packed gate/up activations of FFN units, forward and backward.

The sigmoid is one call per unit; the rest is correctly rounded elementwise arithmetic. Zero columns stay
zero.
"""

import torch

from .units import map_units


def swiglu(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up` [M, U, B] of `gate_up` [M, U, 2, B] (gate first), in `out` if given."""
    gate, up = gate_up.float().unbind(2)
    y = (gate * _sigmoid(gate)).mul_(up).to(gate_up.dtype)
    return y if out is None else out.copy_(y)


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient [M, U, 2, B] of `gate_up` for `dy` [M, U, B]."""
    gate, up = gate_up.float().unbind(2)
    dy32, sigmoid = dy.float(), _sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy32 * up * (sigmoid + silu * (1 - sigmoid))
    return torch.stack([dgate, dy32 * silu], 2).to(gate_up.dtype)


def _sigmoid(gate: torch.Tensor) -> torch.Tensor:
    return map_units(torch.sigmoid, gate)
