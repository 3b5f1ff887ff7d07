"""Cut a tensor into its units, each a contiguous float32 block of one fixed shape."""

import torch

UNIT_DIM = 1
"""Where the units are in an activation [M, U, ...]."""


def unit_blocks(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the U blocks [M, ...] of x [M, U, ...] as contiguous float32 tensors, to be read only.

    A block may be a view of x (where x is float32 and has one unit), or a copy.
    """
    return [block.float().contiguous() for block in x.unbind(UNIT_DIM)]


def join_units(blocks: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return [M, U, ...] in `dtype` from U blocks [M, ...]: the inverse of `unit_blocks`."""
    return torch.stack(blocks, UNIT_DIM).to(dtype)
