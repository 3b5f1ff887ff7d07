"""The order-free product against cuBLAS with fp32 output and a cast, and its error against float64."""

from collections.abc import Callable, Iterator

import torch

from .. import gemm
from ..cut_scale import segment_units
from .rows import Row, interleaved, relative_error
from .shapes import TOKENS, Weight, weights

_UNIT = 128
_ACCURACY_TOKENS = 256
_ACCURACY_COLUMNS = 4096
_TRAINED_UNITS = (32, 112, 224)
_LENGTHS = (4096, 14336, 28672, 128256, 151936)
Maker = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def sections() -> list[Row]:
    """Speed for every distinct weight, by section, then with operands that stray, then accuracy."""
    distinct = {(weight.size, weight.hidden): weight for weight in reversed(weights())}
    rows = [row for weight in reversed(distinct.values()) for row in _speed(weight)]
    rows.sort(key=lambda row: row.section)
    return [*rows, *_directions(), *_accuracy()]


def _speed(weight: Weight) -> Iterator[Row]:
    """Row-parallel forward, column-parallel dgrad: scales, product and finish.

    Column scales belong to the weight, which changes once a step; a second row counts them in every call.
    """
    a = torch.randn(TOKENS, weight.units, weight.rows, device="cuda").bfloat16()
    w = (torch.randn(weight.units, weight.rows, weight.hidden, device="cuda") * 0.02).bfloat16()
    flat_a, flat_w = a.flatten(1), w.flatten(0, 1)
    column = gemm.column_scale(w)

    def ours(column_scale: torch.Tensor) -> torch.Tensor:
        row = gemm.row_scale(gemm.row_norms(a), weight.rows)
        total = gemm.cut_matmul(a, w, row, column_scale, weight.total, weight.first)
        return gemm.finish(total, row, column_scale, weight.total, torch.bfloat16)

    def all_scales() -> torch.Tensor:
        return ours(gemm.column_scale(w))

    def base() -> torch.Tensor:
        return torch.mm(flat_a, flat_w, out_dtype=torch.float32).bfloat16()

    local_rows = gemm.row_scale(gemm.row_norms(a), weight.rows)

    def product() -> torch.Tensor:
        return gemm.cut_matmul(a, w, local_rows, column, weight.total, weight.first)

    def cublas() -> torch.Tensor:
        return torch.mm(flat_a, flat_w, out_dtype=torch.float32)

    calls = [lambda: ours(column), all_scales, base, product, cublas]
    cached, every, stock, alone, stock_alone = interleaved(calls, graphs=True)
    flop = 2 * TOKENS * weight.size * weight.hidden
    shape = f"{TOKENS}x{weight.hidden}x{weight.size}"
    several = "more segments" if weight.units > segment_units(weight.total, weight.rows) else "one segment"
    for section, time, reference in (
        ("row scales", cached, stock),
        ("row and column scales", every, stock),
        ("product alone", alone, stock_alone),
    ):
        baseline = "cuBLAS fp32 out" + ("" if section == "product alone" else ", then cast")
        yield Row(f"cut, {section}, {several}", weight.name, shape, time, reference, baseline, flop, "flop")


def _directions() -> Iterator[Row]:
    """Operands as training leaves them: rows and columns share directions, so that chains leave their window.

    Random ones never do, and cannot show what that costs.
    """
    for units in _TRAINED_UNITS:
        a = torch.randn(TOKENS, units, _UNIT, device="cuda").bfloat16()
        w = (torch.randn(units, _UNIT, _ACCURACY_COLUMNS, device="cuda") * 0.02).bfloat16()
        yield _straying("no direction shared", a, w)
        direction = torch.randn(units, _UNIT, device="cuda").bfloat16()
        w[:, :, :: _ACCURACY_COLUMNS // 2] += 0.01 * direction[..., None]
        yield _straying("all rows with two columns", a + 0.3 * direction, w)
        rows = torch.arange(TOKENS, device="cuda") % 7 < 3
        columns = torch.arange(_ACCURACY_COLUMNS, device="cuda") % 5
        a[rows] += 0.5
        yield _straying(
            "3 of 7 rows with 2 of 5 columns", a, w + 0.02 * (columns == 0) - 0.02 * (columns == 1)
        )


def _straying(name: str, a: torch.Tensor, w: torch.Tensor) -> Row:
    """The product alone."""
    a, w = a.bfloat16(), w.bfloat16()
    units, size = a.shape[1], a.shape[1] * _UNIT
    row, column = gemm.row_scale(gemm.row_norms(a), _UNIT), gemm.column_scale(w)

    def ours() -> torch.Tensor:
        return gemm.cut_matmul(a, w, row, column, units)

    def base() -> torch.Tensor:
        return torch.mm(a.flatten(1), w.flatten(0, 1), out_dtype=torch.float32)

    time, stock = interleaved([ours, base], graphs=True)
    shape = f"{a.shape[0]}x{w.shape[2]}x{size}"
    flop = 2 * a.shape[0] * w.shape[2] * size
    return Row("cut, shared directions", name, shape, time, stock, "cuBLAS fp32 out", flop, "flop")


def _accuracy() -> Iterator[Row]:
    for name, make in _INPUTS.items():
        for length in _LENGTHS:
            torch.manual_seed(length)
            a, w = make(length)
            a, w = (
                a.bfloat16().view(-1, length // _UNIT, _UNIT),
                w.bfloat16().view(length // _UNIT, _UNIT, -1),
            )
            yield _error(name, a, w)


def _error(name: str, a: torch.Tensor, w: torch.Tensor) -> Row:
    units = a.shape[1]

    def run() -> torch.Tensor:
        row, column = gemm.row_scale(gemm.row_norms(a), _UNIT), gemm.column_scale(w)
        return gemm.finish(gemm.cut_matmul(a, w, row, column, units), row, column, units, torch.bfloat16)

    exact = torch.zeros(a.shape[0], w.shape[2], device="cuda", dtype=torch.float64)
    for unit in range(units):
        exact += a[:, unit].double() @ w[unit].double()
    error = relative_error(run(), exact) / relative_error(exact.bfloat16(), exact)
    (time,) = interleaved([run], graphs=True)
    flop = 2 * a.shape[0] * units * _UNIT * w.shape[2]
    return Row(
        "cut, error", name, f"K={units * _UNIT}", time, None, "none", flop, "flop", error,
        "over that of correct rounding to bf16",
    )  # fmt: skip


def _gaussian(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(_ACCURACY_TOKENS, k, device="cuda"), torch.randn(
        k, _ACCURACY_COLUMNS, device="cuda"
    ) * 0.02


def _swiglu(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, w = _gaussian(k)
    return torch.nn.functional.silu(a) * torch.randn_like(a), w


def _outliers(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, w = _gaussian(k)
    a[:, torch.randperm(k, device="cuda")[:4]] *= 300
    return a, w


def _ignored_outliers(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, w = _gaussian(k)
    channels = torch.randperm(k, device="cuda")[:4]
    a[:, channels] *= 300
    w[channels] = 0
    return a, w


def _logits_gradient(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a model that is nearly sure: eight likely tokens each, a target drawn among all."""
    logits, w = _gaussian(k)
    likely = torch.randint(k, (_ACCURACY_TOKENS, 8), device="cuda")
    logits = logits.scatter_add(1, likely, 14 + 2 * torch.randn(likely.shape, device="cuda"))
    probability = logits.softmax(1)
    target = probability.multinomial(1)
    return probability.scatter_add(1, target, -torch.ones_like(target, dtype=torch.float32)), w


_INPUTS: dict[str, Maker] = {
    "Gaussian": _gaussian,
    "SwiGLU": _swiglu,
    "four 300x channels": _outliers,
    "the same, ignored": _ignored_outliers,
    "gradient of logits": _logits_gradient,
}
