"""Plots of a result, with matplotlib (the optional extra `plan`), which is imported when it is needed.

`check_plots` says before the work what would not work after it.
"""

import errno
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ntp.planner.simulation import Result, Series, Sweep
from ntp_launcher.flags import LaunchError


def check_plots(directory: str) -> None:
    """Makes the folder. Raises LaunchError where it cannot be written, or matplotlib is not there."""
    if find_spec("matplotlib") is None:
        raise LaunchError("--plots needs matplotlib: pip install 'ntp-trainer[plan]'")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot write plots to {directory!r}: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise LaunchError(f"cannot write plots to {directory!r}: {os.strerror(errno.EACCES)}")


def write_plots(result: Result, directory: str) -> list[Path]:
    """Throughput over time, loss over failed fraction and spares needed, as PNG. Raises LaunchError."""
    from matplotlib.figure import Figure

    folder = Path(directory)
    drawn: list[tuple[str, Any]] = []
    if result.series:
        drawn.append(("throughput.png", _over_time(Figure(figsize=(9, 5)), result.series)))
    if result.sweep:
        drawn.append(("loss.png", _over_fraction(Figure(figsize=(9, 5)), result.sweep)))
    if result.spares:
        drawn.append(("spares.png", _spares(Figure(figsize=(9, 5)), result.spares)))
    try:
        for name, figure in drawn:
            figure.savefig(folder / name, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise LaunchError(f"cannot write plots to {directory!r}: {error.strerror}") from None
    return [folder / name for name, _ in drawn]


def _over_time(figure: Any, series: Series) -> Any:
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = np.append(series.time, series.time[-1] + series.hours[-1]) / 24
    for name, rates in series.throughput.items():
        axes.stairs(rates * 100, edges, label=name, baseline=None)
    below.stairs(series.failed * 100, edges, color="black", baseline=None)
    axes.set_ylabel("throughput, % of the healthy job")
    below.set_ylabel("GPUs down, %")
    below.set_xlabel("day")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _over_fraction(figure: Any, sweep: Sweep) -> Any:
    axes = figure.subplots()
    fractions = np.array(sweep.fractions) * 100
    for name, loss in sweep.loss.items():
        (line,) = axes.plot(fractions, loss.mean(axis=1) * 100, label=name)
        low, high = loss.min(axis=1) * 100, loss.max(axis=1) * 100
        axes.fill_between(fractions, low, high, color=line.get_color(), alpha=0.15)
    axes.set_xlabel("GPUs down, %")
    axes.set_ylabel("lost throughput, % (band: all samples)")
    axes.legend(fontsize="small")
    return figure


def _spares(figure: Any, spares: dict[str, list[int | None]]) -> Any:
    axes = figure.subplots()
    found = {name: [n for n in needed if n is not None] for name, needed in spares.items()}
    names = [name for name, needed in found.items() if needed]
    most = [max(found[name]) for name in names]
    axes.barh(names, most, color="lightgray")
    for place, name in enumerate(names):
        axes.plot(found[name], [place] * len(found[name]), "k|")
    axes.set_xlabel("spare domains that keep the batch whole (bar: worst seed, marks: each seed)")
    axes.invert_yaxis()
    return figure
