"""`python -m ntp_kernels.bench [section ...] [--json FILE]`: a table per section and a JSON file.

A section is a module of this package with `sections() -> list[Row]`; without arguments all of them run. Last
comes what the kernels are held to, with what this run reached.
Needs a GPU.
"""

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

from .rows import Ceiling, Row, geomean, measure_ceiling
from .targets import verdicts

SECTIONS = ("gemm", "cut", "pointwise", "attention")


def main() -> None:
    """Runs the sections that are asked for; prints a table each and writes all rows as JSON."""
    parser = argparse.ArgumentParser(prog="ntp_kernels.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", default=SECTIONS, metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the rows go")
    arguments = parser.parse_args()
    ceiling = measure_ceiling()
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{card}; ceilings {ceiling.tflops:.0f} TFLOP/s, {ceiling.gigabytes:.0f} GB/s")
    rows: list[Row] = []
    for name in arguments.sections:
        rows += _run(name, ceiling)
    _print_verdicts(rows)
    report = {"card": card, "ceiling": asdict(ceiling), "rows": [_record(row, ceiling) for row in rows]}
    arguments.json.write_text(json.dumps(report, indent=1))


def _run(name: str, ceiling: Ceiling) -> list[Row]:
    rows = importlib.import_module(f"{__package__}.{name}").sections()
    for section in dict.fromkeys(row.section for row in rows):
        _print_table([row for row in rows if row.section == section], ceiling)
    return rows


def _print_table(rows: list[Row], ceiling: Ceiling) -> None:
    unit = "TFLOP/s" if rows[0].unit == "flop" else "GB/s"
    print(f"\n{rows[0].section} (baseline: {rows[0].baseline}; error: {rows[0].error_kind or 'none'})")
    print(f"{'kernel':22}{'shape':34}{'us':>9}{'base us':>9}{'ratio':>7}{unit:>9}{'share':>7}{'error':>10}")
    for row in rows:
        base = f"{row.baseline_us:9.1f}{row.ratio:7.3f}" if row.baseline_us else f"{'-':>9}{'-':>7}"
        error = f"{row.error:10.3g}" if row.error is not None else f"{'-':>10}"
        times = f"{row.ours_us:9.1f}{base}{row.rate:9.0f}{ceiling.share(row):7.2f}"
        print(f"{row.kernel:22}{row.shape:34}{times}{error}")
    ratios = [row.ratio for row in rows if row.ratio]
    if ratios:
        print(f"{'':22}{'geomean, least':34}{'':18}{geomean(ratios):7.3f}{min(ratios):9.3f}")


def _print_verdicts(rows: list[Row]) -> None:
    print("\ntargets")
    for verdict in verdicts(rows):
        bound = f"{verdict.side} {verdict.bound:g}"
        reached = "pass" if verdict.reached else "MISS"
        print(f"{verdict.name:62}{verdict.count:4} rows{verdict.value:9.3f}  {bound:8}{reached}")


def _record(row: Row, ceiling: Ceiling) -> dict[str, object]:
    return {**asdict(row), "ratio": row.ratio, "rate": row.rate, "share": ceiling.share(row)}


if __name__ == "__main__":
    main()
