"""Cut a tensor into its units, each a contiguous float32 block of one fixed shape."""

from collections.abc import Sequence

import torch


def unit_blocks(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the U blocks [M, ...] of x [M, U, ...] as contiguous float32 tensors, to be read only.

    The blocks may be views of x (where x is float32 and has one unit), or copies.
    """
    return x.float().transpose(0, 1).contiguous().unbind(0)


def join_units(blocks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return [M, U, ...] in `dtype` from U blocks [M, ...]: the inverse of `unit_blocks`."""
    return torch.stack(list(blocks), 1).to(dtype)
