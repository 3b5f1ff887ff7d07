"""`ntp-store --port 29500`: a control store on a host without GPUs, for `ntp-launch --control-endpoint`.

It serves any number of jobs until it is stopped, and forgets everything then. Exit codes: 0 stopped by
SIGINT or SIGTERM; 2 bad input, or a port that is taken.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from ntp_launcher.ending import ending
from ntp_launcher.flags import LaunchError, OneLineParser, port_number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-store", lambda: _serve(build_parser().parse_args(argv)))


def _serve(args: argparse.Namespace) -> int:
    stops = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    from ntp_launcher.control_store import serve

    try:
        store = serve("localhost", args.port)
    except RuntimeError:
        raise LaunchError(f"port {args.port} cannot be used") from None
    sys.stdout.write(f"ntp-store: port {store.port}\n")
    sys.stdout.flush()
    signal.sigwait(stops)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = OneLineParser(prog="ntp-store", description="Serve control stores of jobs.", allow_abbrev=False)
    parser.add_argument(
        "--port", type=port_number, default=29400, help="TCP port, 0 = any free one (default: 29400)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
