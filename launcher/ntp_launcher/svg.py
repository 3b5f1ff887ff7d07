"""Charts as inline SVG: lines, stacked bars and a timeline. Text in, text out; colours are CSS classes.

A chart has a fixed drawing area, about as wide as a phone, and scales to the width of the page: its labels
can be read there and are not huge on a desk. Long series are thinned to as many points as can be told apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 10, 28
_LABEL, _TOTAL = 100, 62  # of a stacked bar: the name before it, the sum behind it
_BAR = 24
_MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Series:
    """A line: `points` are (x, y); `style` is a class s0 .. s5."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of a timeline: row, from and to (x), class and what is told on hovering."""

    row: int
    start: float
    stop: float
    style: str
    title: str


def lines(series: Sequence[Series], x_label: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """A line chart; `marks` are vertical lines at x with a title."""
    points = [point for one in series for point in one.points if math.isfinite(point[1])]
    if not points:
        return '<p class="none">no values</p>'
    x_axis = _Axis.of([x for x, _ in points], _LEFT, WIDTH - _RIGHT, pad=False)
    y_axis = _Axis.of([y for _, y in points], HEIGHT - _BOTTOM, _TOP)
    body = [_grid(x_axis, y_axis, x_label)]
    for x, title in marks:
        at = x_axis.at(x)
        body.append(
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
            f"<title>{escape(title)}</title></line>"
        )
    for one in series:
        thinned = _thin([point for point in one.points if math.isfinite(point[1])])
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in thinned)
        body.append(
            f'<polyline class="line {one.style}" points="{path}"><title>{escape(one.name)}</title></polyline>'
        )
    return _svg(HEIGHT, body)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], unit: str) -> str:
    """Horizontal bars, one a row: (label, parts), a part is (name, value, class)."""
    if not rows:
        return '<p class="none">none</p>'
    most = max(sum(value for _, value, _ in parts) for _, parts in rows) or 1.0
    axis = _Axis.of([0.0, most], _LABEL, WIDTH - _TOTAL, pad=False)
    body: list[str] = []
    for place, (label, parts) in enumerate(rows):
        top, x = place * _BAR + 4, 0.0
        body.append(f'<text x="{_LABEL - 6}" y="{top + 12}" text-anchor="end">{escape(label)}</text>')
        for name, value, style in parts:
            wide = axis.at(x + value) - axis.at(x)
            title = f"{name}: {value:.3f} {unit}"
            body.append(
                f'<rect class="{style}" x="{axis.at(x):.1f}" y="{top}" width="{max(0.0, wide):.1f}" '
                f'height="{_BAR - 8}">'
                f"<title>{escape(title)}</title></rect>"
            )
            x += value
        body.append(f'<text x="{axis.at(x) + 6:.1f}" y="{top + 12}">{x:.2f} {escape(unit)}</text>')
    return _svg(len(rows) * _BAR + 6, body)


def timeline(rows: Sequence[str], spans: Sequence[Span], x_label: str) -> str:
    """A row per name, bars on it."""
    step = 16 if len(rows) <= 24 else max(3, 400 // len(rows))
    bottom = len(rows) * step + _TOP
    stop = max((span.stop for span in spans), default=1.0) or 1.0
    axis = _Axis.of([0.0, stop], _LEFT, WIDTH - _RIGHT, pad=False)
    body = [_ticks(axis, bottom, x_label)]
    every = max(1, math.ceil(16 / step))
    for place, name in enumerate(rows):
        if place % every == 0:
            y = _TOP + place * step + min(step, 14) * 0.75
            body.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>')
    for span in spans:
        y, wide = _TOP + span.row * step, max(0.8, axis.at(span.stop) - axis.at(span.start))
        body.append(
            f'<rect class="{span.style}" x="{axis.at(span.start):.1f}" y="{y:.1f}" width="{wide:.1f}" '
            f'height="{max(1.5, step - 3):.1f}"><title>{escape(span.title)}</title></rect>'
        )
    return _svg(bottom + _BOTTOM, body)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    first: float
    last: float

    @classmethod
    def of(cls, values: Sequence[float], first: float, last: float, pad: bool = True) -> "_Axis":
        low, high = min(values), max(values)
        if low == high:
            low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
        room = (high - low) * 0.04 if pad else 0.0
        return cls(low - room, high + room, first, last)

    def at(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self, about: int) -> list[float]:
        """Round numbers inside the axis."""
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str) -> str:
    parts = [_ticks(x_axis, HEIGHT - _BOTTOM, x_label)]
    for value in y_axis.ticks(4):
        y = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    return "".join(parts)


def _ticks(axis: _Axis, bottom: float, label: str) -> str:
    parts = [f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for value in axis.ticks(5):
        if axis.at(value) < WIDTH - 80:  # the label stands there
            parts.append(
                f'<text x="{axis.at(value):.1f}" y="{bottom + 18}" text-anchor="middle">{short(value)}</text>'
            )
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{bottom + 18}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def short(value: float) -> str:
    """At most five letters: 12k, 3.4M, 0.02."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:.4g}"


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lowest and highest of every stretch, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def _svg(height: float, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(body)}</svg>'
