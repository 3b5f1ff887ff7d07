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
from ntp_launcher.paths import path_name
from ntp_launcher.run_files import read_events

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
    parser.add_argument("run_dir", type=path_name, metavar="RUN_DIR", help="the directory of the run")
    parser.add_argument(
        "--ranks",
        required=True,
        action="append",
        metavar="RANKS",
        help="base-mesh ranks (3,5), coordinates (dp=0/tp=3) or @FILE, one a line",
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
    sys.stdout.write(f"ntp-heal: {_answer(ranks, _failed(run_dir))}\n")
    return 0


def _failed(run_dir: Path) -> list[int]:
    """Ranks that do not take part in the newest generation that the launcher has told of."""
    told = [event["failed"] for event in read_events(run_dir) if "failed" in event]
    return told[-1] if told else []


def _answer(ranks: Sequence[int], failed: Sequence[int]) -> str:
    """What happens to each of the ranks that were asked for."""
    away = [rank for rank in ranks if rank in failed]
    present = [rank for rank in ranks if rank not in failed]
    parts: list[str] = []
    if away:
        its = "its device is" if len(away) == 1 else "their devices are"
        parts.append(
            f"{_named(away)} not taking part: {its} looked at, and what is well comes back at a step boundary"
        )
    if present:
        parts.append(f"{_named(present)} taking part already: nothing to do")
    return "; ".join(parts)


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _ranks(config: Config, texts: Sequence[str]) -> list[int]:
    parallel = config.parallel
    return sorted(parse_failed(texts, parallel.dp, parallel.tp, parallel.standbys))


if __name__ == "__main__":
    sys.exit(main())
