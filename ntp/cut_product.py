"""The product that tensor parallelism cuts, its exchange, and the weight gradients that hide it.

Shapes as in `ntp.ops`.
"""

from ntp_kernels import dispatch as kernels
from torch import Tensor

from ntp.exchange import CutExchange
from ntp.weight import Weight


def start_cut_product(
    a: Tensor,
    weight: Weight,
    exchange: CutExchange,
    output: Tensor,
    rows: slice | None = None,
    norms: Tensor | None = None,
) -> None:
    """Begin `output[rows]` = a [rows, U, R] times weight [U, R, D] over the units of all ranks.

    `norms` are the `row_norms` of `a`, if the caller has them.
    """
    rows = rows or slice(0, a.shape[0])
    columns, units, first_unit = weight.scale, weight.total_units, weight.first_unit
    norms = exchange.gather(kernels.row_norms(a) if norms is None else norms, units, first_unit, rows)
    scale = kernels.row_scale(norms, a.shape[2])
    shares = exchange.shares(output, rows)

    def local(some: slice) -> slice:
        return slice(some.start - rows.start, some.stop - rows.start)

    for share in shares:
        some = local(share.rows)
        some_scale = kernels.some_rows(scale, some)
        kernels.cut_matmul(a[some], weight.data, some_scale, columns, units, first_unit, out=share.out)
    weight.count_product(a.shape[0])

    def finish(total: Tensor, some: slice, out: Tensor) -> None:
        kernels.finish(total, kernels.some_rows(scale, local(some)), columns, units, out.dtype, out)

    exchange.start(shares, output, finish)


def add_wgrad(dy: Tensor, x: Tensor, weight: Weight, exchange: CutExchange, last_use: bool = True) -> None:
    """Add dy [M, U, R] transposed times x [M, D] to the gradient of `weight`, perhaps behind an exchange."""

    def work() -> None:
        kernels.linear_wgrad(dy, x, weight.grad)
        weight.count_product(x.shape[0])
        if last_use:
            weight.announce_grad()

    exchange.defer(work, 2 * x.shape[0] * weight.data.numel())


def input_grad(dy: Tensor, weight: Weight, exchange: CutExchange, norms: Tensor | None = None) -> Tensor:
    """Return dx [M, D] of dy [M, U, R], while deferred weight gradients hide its exchange.

    `norms` as in `start_cut_product`.
    """
    dx = exchange.output(dy.new_empty(dy.shape[0], weight.data.shape[2]))
    start_cut_product(dy, weight, exchange, dx, norms=norms)
    exchange.cover(dx.numel())
    exchange.wait(dx)
    return dx
