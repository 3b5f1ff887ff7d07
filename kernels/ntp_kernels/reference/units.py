"""Cut a tensor into its units, each a contiguous float32 block of one fixed shape.

A call may have no units at all: a small model on many ranks leaves some of them without a KV group.
"""

from collections.abc import Callable, Sequence

import torch


def unit_blocks(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the U blocks [M, ...] of x [M, U, ...] as contiguous float32 tensors, to be read only.

    The blocks may be views of x (where x is float32 and has one unit), or copies.
    """
    return x.float().transpose(0, 1).contiguous().unbind(0)


def map_units(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return f32 [M, U, ...]: `function` of every block [M, ...] of x [M, U, ...]."""
    blocks = unit_blocks(x)
    if not blocks:
        return function(x.new_zeros(x.shape[0], *x.shape[2:]).float()).unsqueeze(1)[:, :0]
    return torch.stack([function(block) for block in blocks], 1)
