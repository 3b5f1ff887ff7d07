"""`ntp-report RUN_DIR...`: one HTML page about one run, or about several beside each other.

Exit codes: 0 written, 2 a run cannot be read or the page not be written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ntp_launcher.ending import ending
from ntp_launcher.flags import LaunchError, OneLineParser
from ntp_launcher.paths import path_name
from ntp_launcher.report_data import read_run
from ntp_launcher.report_page import page


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-report", lambda: _report(build_parser().parse_args(argv)))


def _report(args: argparse.Namespace) -> int:
    text = page([read_run(path) for path in args.runs])
    target = Path(args.output or Path(args.runs[0]) / "report.html")
    _refuse_own_files(target, args.runs)
    _write(target, text)
    sys.stdout.write(f"wrote {target}\n")
    return 0


def build_parser() -> OneLineParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-report", description="Write one HTML page about runs, with plots.", allow_abbrev=False
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=path_name,
        metavar="RUN_DIR",
        help="what ntp-launch wrote; several are compared",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=path_name,
        metavar="FILE",
        help="where the page goes (default: report.html in the first run)",
    )
    return parser


def _refuse_own_files(target: Path, runs: Sequence[str]) -> None:
    """Raises LaunchError where the page would replace what a run has written."""
    folders = [Path(run).resolve() for run in runs]
    if target.exists() and target.suffix != ".html" and target.resolve().parent in folders:
        raise LaunchError(f"{str(target)!r} is a file of the run: give another name")


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write {str(target)!r}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
