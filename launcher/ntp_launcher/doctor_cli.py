"""`ntp-doctor`: what this machine is, what will not work on it and what to do; for bug reports.

Exit codes: 0 nothing is broken, 1 something is.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ntp_launcher.doctor import examine
from ntp_launcher.ending import ending
from ntp_launcher.flags import OneLineParser
from ntp_launcher.paths import path_name

_SIGNS = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-doctor", lambda: _doctor(build_parser().parse_args(argv)))


def _doctor(args: argparse.Namespace) -> int:
    worst = 0
    for finding in examine(args.run_dir):
        worst = max(worst, int(finding.level == "bad"))
        if args.json:
            sys.stdout.write(json.dumps(asdict(finding)) + "\n")
            continue
        sys.stdout.write(f"{_SIGNS[finding.level]}  {finding.name:<16} {finding.found}\n")
        if finding.advice:
            sys.stdout.write(f"      {'':<16} -> {finding.advice}\n")
        sys.stdout.flush()
    return worst


def build_parser() -> OneLineParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-doctor", description="Look at this machine and say what will not work.", allow_abbrev=False
    )
    parser.add_argument(
        "--run-dir",
        type=path_name,
        default=".",
        metavar="DIR",
        help="where runs are to be written (default: here)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
