"""What a bench section returns, and how two calls are timed against each other."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One kernel at one shape. `amount` is FLOP or bytes of one call; `error` is what `error_kind` names."""

    section: str
    kernel: str
    shape: str
    ours_us: float
    baseline_us: float | None
    baseline: str
    amount: float
    unit: Literal["flop", "byte"]
    error: float | None = None
    error_kind: str = ""

    @property
    def ratio(self) -> float | None:
        """Baseline time over ours: above 1 is faster than the baseline."""
        return None if self.baseline_us is None else self.baseline_us / self.ours_us

    @property
    def rate(self) -> float:
        """TFLOP/s or GB/s."""
        return self.amount / self.ours_us / (1e6 if self.unit == "flop" else 1e3)


@dataclass(frozen=True)
class Ceiling:
    """The best the card showed in this run: a large cuBLAS product and a large copy."""

    tflops: float
    gigabytes: float

    def share(self, row: Row) -> float:
        """The row's rate over this ceiling, of arithmetic or of memory as its unit asks."""
        return row.rate / (self.tflops if row.unit == "flop" else self.gigabytes)


def measure_ceiling() -> Ceiling:
    """bf16 8192^3 through cuBLAS, and a 1 GiB device copy (bytes read plus bytes written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    (product, copy) = interleaved([lambda: a @ b, lambda: target.copy_(source)])
    return Ceiling(2 * 8192**3 / product / 1e6, 2 * (1 << 30) / copy / 1e3)


def interleaved(
    calls: Sequence[Call], rounds: int = 31, budget_us: float = 600.0, *, graphs: bool = False
) -> list[float]:
    """Median microseconds of each call, timed in turns so that the card's clock favours none.

    A turn repeats its call for about `budget_us`, short enough that the card's power, and with it the clock,
    is that of all calls together; every other round takes them in reverse.
    With `graphs` a turn is one replay of a CUDA graph, so that launches of small kernels do not count.
    """
    repeats = [max(1, min(50, round(budget_us / _elapsed(call, 2)))) for call in calls]
    if graphs:
        calls = [_captured(call, n).replay for call, n in zip(calls, repeats, strict=True)]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for i in range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls))):
            times[i].append(_elapsed(calls[i], 1) / repeats[i] if graphs else _elapsed(calls[i], repeats[i]))
    return [statistics.median(each) for each in times]


def _captured(call: Call, repeats: int) -> torch.cuda.CUDAGraph:
    """A graph of `repeats` calls in a row."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def _elapsed(call: Call, repeats: int) -> float:
    """Microseconds of one of `repeats` calls in a row, after one that is not timed."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / repeats


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """|value - exact| / |exact| over all elements, in float64."""
    return ((value.double() - exact).norm() / exact.norm()).item()


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return statistics.geometric_mean(values)
