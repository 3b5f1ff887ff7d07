"""What the kernels are held to, and whether the rows of a run reach it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .rows import Row, geomean

_ATTENTION = "1 x 8192, 1 doc, 32/8 heads x 128"


@dataclass(frozen=True)
class Verdict:
    """A target over a run's rows: the value found, the bound and the side on which it must lie."""

    name: str
    count: int
    value: float
    side: Literal[">=", "<="]
    bound: float

    @property
    def reached(self) -> bool:
        """Whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.side == ">=" else self.value <= self.bound


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every target that the rows of this run can answer."""
    return [*_products(rows), *_cut(rows), *_errors(rows), *_attention(rows), *_memory(rows)]


def _products(rows: Sequence[Row]) -> list[Verdict]:
    """Whole contractions against cuBLAS: forward and backward to the input are one op, `linear`."""
    whole = [row for row in rows if row.section in ("linear", "wgrad")]
    return [
        *_ratio("whole contraction, geometric mean", whole, geomean, 0.97),
        *_ratio("whole contraction, least", whole, min, 0.90),
    ]


def _cut(rows: Sequence[Row]) -> list[Verdict]:
    """Cut contractions with row scales and finish against cuBLAS and a cast."""
    one = [row for row in rows if row.section == "cut, row scales, one segment"]
    more = [row for row in rows if row.section == "cut, row scales, more segments"]
    long = [row for row in one if _contraction(row) >= 2048]
    return [
        *_ratio("cut, one segment, K >= 2048, geometric mean", long, geomean, 0.97),
        *_ratio("cut, one segment, K >= 2048, least", long, min, 0.90),
        *_ratio("cut, one segment, K = 1024", [row for row in one if _contraction(row) == 1024], min, 0.80),
        *_ratio("cut, more segments, geometric mean", more, geomean, 0.85),
    ]


def _errors(rows: Sequence[Row]) -> list[Verdict]:
    found = [row for row in rows if row.section == "cut, error"]
    ignored = [row.error for row in found if row.error and row.kernel == "the same, ignored"]
    others = [
        row.error
        for row in found
        if row.error and row.kernel not in ("the same, ignored", "gradient of logits")
    ]
    return [
        *_value("cut, error over that of correct rounding", others, max, "<=", 1.02),
        *_value("the same, channels that the weights ignore", ignored, max, "<=", 1.15),
    ]


def _attention(rows: Sequence[Row]) -> list[Verdict]:
    result: list[Verdict] = []
    for kernel, floor, wanted in (("forward", 395.0, 500.0), ("backward", 350.0, 430.0)):
        rates = [
            row.rate
            for row in rows
            if (row.section, row.kernel, row.shape) == ("attention", kernel, _ATTENTION)
        ]
        for name, bound in (("floor", floor), ("target", wanted)):
            result += _value(f"attention {kernel}, TFLOP/s, {name}", rates, min, ">=", bound)
    return result


def _memory(rows: Sequence[Row]) -> list[Verdict]:
    """Shares of the copy bandwidth; cross entropy may take 1.25 times the reading of its logits."""
    pointwise = [row for row in rows if row.section == "pointwise"]
    entropy = [row for row in pointwise if row.kernel == "cross entropy, all"]
    parts = ("cross entropy, all", "ce_statistics", "ce_sums", "ce_backward")
    others = [row for row in pointwise if row.kernel not in parts]
    times = [1 / row.ratio for row in entropy if row.ratio]
    return [
        *(v for row in others for v in _ratio(f"{row.kernel} {row.shape}, share of copy", [row], min, 0.85)),
        *_value("cross entropy over reading the logits three times", times, max, "<=", 1.25),
    ]


def _contraction(row: Row) -> int:
    """K of a shape MxDxK."""
    return int(row.shape.split("x")[2])


def _ratio(
    name: str, rows: Iterable[Row], fold: Callable[[list[float]], float], bound: float
) -> list[Verdict]:
    return _value(name, [row.ratio for row in rows if row.ratio], fold, ">=", bound)


def _value(
    name: str,
    values: list[float],
    fold: Callable[[list[float]], float],
    side: Literal[">=", "<="],
    bound: float,
) -> list[Verdict]:
    return [Verdict(name, len(values), fold(values), side, bound)] if values else []
