"""A rank's part of one parameter, as the layers see it.

Weights are not autograd leaves. A backward adds a weight's gradient straight into `main_grad`, in the order
in which microbatches run, so that no accumulation order is left to autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class Weight:
    """Local units of a sharded parameter, or a whole replicated one.

    Attributes:
        name: canonical name, for messages.
        data: compute dtype; sharded `[U, R, D]` (a bias `[U, R]`), replicated `[D]` or `[H]`.
        total_units: units of the parameter over all ranks of the replica; 1 where it is replicated.
        first_unit: global id of the first local unit.
        main_grad: float32 of the shape of `data`; gradients of the SUM of token losses are added to it.
        column_scale: [D] over ALL units, see `ntp.layers.refresh_scales`; needed where the
            weight takes part in a contraction that tensor parallelism cuts.
        gemm_flops: floating-point operations (a multiply-add is two) of the matrix products with this weight
            so far, on this rank.
        on_grad_ready: called when a backward has added all that one microbatch contributes to `main_grad`.
    """

    name: str
    data: Tensor
    total_units: int = 1
    first_unit: int = 0
    main_grad: Tensor | None = None
    column_scale: Tensor | None = None
    gemm_flops: int = 0
    on_grad_ready: Callable[[], None] | None = None

    def count_product(self, tokens: int) -> None:
        """Count a matrix product of `tokens` rows with this weight, or with its shape."""
        self.gemm_flops += 2 * tokens * self.data.numel()

    @property
    def grad(self) -> Tensor:
        """The gradient buffer; whoever runs a backward has bound one."""
        assert self.main_grad is not None, f"{self.name}: no gradient buffer"
        return self.main_grad

    @property
    def scale(self) -> Tensor:
        """The column scale; whoever changes `data` has refreshed it."""
        assert self.column_scale is not None, f"{self.name}: call refresh_scales first"
        return self.column_scale

    def announce_grad(self) -> None:
        """Tell whoever exchanges gradients that this microbatch is complete here."""
        if self.on_grad_ready is not None:
            self.on_grad_ready()
