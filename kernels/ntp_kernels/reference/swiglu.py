"""SwiGLU on the packed gate/up activations of FFN units, forward and backward.

The sigmoid is one call per unit; the rest is correctly rounded elementwise arithmetic. Zero columns stay
zero.
"""

import torch

from .gemm import row_norms
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


def swiglu_with_norms(
    gate_up: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `swiglu` returns, and its `row_norms`."""
    y = swiglu(gate_up, out)
    return y, row_norms(y)


def swiglu_backward_with_norms(dy: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `swiglu_backward` returns, and its `row_norms`, a unit having 2 B columns."""
    dgate_up = swiglu_backward(dy, gate_up)
    return dgate_up, row_norms(dgate_up.flatten(2))


def _sigmoid(gate: torch.Tensor) -> torch.Tensor:
    return map_units(torch.sigmoid, gate)
