"""`ntp-export RUN_DIR OUT`: a checkpoint as a folder that `transformers` loads."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ntp_launcher.ending import ending
from ntp_launcher.flags import OneLineParser, number
from ntp_launcher.paths import path_name


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, or 2 with one line on stderr."""
    return ending("ntp-export", lambda: _export(build_parser().parse_args(argv)))


def _export(args: argparse.Namespace) -> int:
    from ntp.export import export  # torch, after the command line is known to be right

    step, dtype = export(Path(args.run_dir), Path(args.out), args.step, args.dtype)
    sys.stdout.write(f"ntp-export: step {step} in {dtype}, written to {args.out}\n")
    return 0


def build_parser() -> OneLineParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-export", description="Write a checkpoint as a Hugging Face folder.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=path_name, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("out", type=path_name, metavar="OUT", help="the folder to write, new or empty")
    parser.add_argument("--step", type=number(0), help="which checkpoint (default: the newest sound one)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: that of the imported model, else float32)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
