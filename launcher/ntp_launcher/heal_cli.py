"""`ntp-heal RUN_DIR --ranks 3,5`: these devices are well again; probe them and take them back.

Exit codes: 0 the running launcher has taken the request; 2 bad input, or no launcher runs this job.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ntp.config import Config
from ntp.run_directory import read_config
from ntp.topology import parse_failed
from ntp_launcher.ending import ending
from ntp_launcher.flags import LaunchError, OneLineParser
from ntp_launcher.heal import request

_PATIENCE_S = 10.0
_POLL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-heal", lambda: _heal(build_parser().parse_args(argv)))


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-heal", description="Take repaired devices back into a running job.", allow_abbrev=False
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the directory of the run")
    parser.add_argument(
        "--ranks",
        required=True,
        action="append",
        metavar="RANKS",
        help="base-mesh ranks (3,5) or coordinates (dp=0/tp=3)",
    )
    return parser


def _heal(args: argparse.Namespace) -> int:
    run_dir = Path(args.run_dir)
    ranks = _ranks(read_config(run_dir), args.ranks)
    try:
        path = request(run_dir, ranks)
    except OSError as error:
        raise LaunchError(f"cannot write to the run directory {args.run_dir!r}: {error.strerror}") from None
    deadline = time.monotonic() + _PATIENCE_S
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            raise LaunchError(f"no launcher is running the job of {args.run_dir!r}")
        time.sleep(_POLL_S)
    return 0


def _ranks(config: Config, texts: Sequence[str]) -> list[int]:
    parallel = config.parallel
    return sorted(parse_failed(texts, parallel.dp, parallel.tp, parallel.standbys))


if __name__ == "__main__":
    sys.exit(main())
