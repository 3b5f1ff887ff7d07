"""`ntp-report RUN_DIR...`: one HTML page about one run, or about several beside each other.

Exit codes: 0 written, 2 a run cannot be read or the page not be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ntp.errors import NtpError
from ntp_launcher.flags import LaunchError, OneLineParser
from ntp_launcher.report_data import read_run
from ntp_launcher.report_page import page


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        text = page([read_run(path) for path in args.runs])
        target = Path(args.output) if args.output else Path(args.runs[0]) / "report.html"
        _write(target, text)
    except NtpError as error:
        sys.stderr.write(f"ntp-report: {' '.join(str(error).split())}\n")
        return error.exit_code
    sys.stdout.write(f"wrote {target}\n")
    return 0


def build_parser() -> OneLineParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-report", description="Write one HTML page about runs, with plots.", allow_abbrev=False
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="what ntp-launch wrote; several are compared"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the page goes (default: report.html in the first run)"
    )
    return parser


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write {str(target)!r}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
