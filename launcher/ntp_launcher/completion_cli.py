"""`ntp-completion SHELL`: what makes a shell complete the options and files of every command.

The scripts are static: they are made from the parsers once, so that pressing Tab starts no Python. Whether a
value is a file or a directory is read from the name by which the help calls it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import shtab

from ntp_launcher import (
    cli,
    compare_cli,
    doctor_cli,
    export_cli,
    heal_cli,
    plan_cli,
    report_cli,
    store_cli,
)
from ntp_launcher.ending import ending
from ntp_launcher.flags import OneLineParser

SHELLS = ("bash", "zsh", "fish")
_FILES = ("CONFIG.yaml", "CLUSTER.yaml", "FILE", "WHAT")
_DIRECTORIES = ("DIR", "RUN_DIR", "OUT")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-completion", lambda: _completion(build_parser().parse_args(argv)))


def _completion(args: argparse.Namespace) -> int:
    sys.stdout.writelines(completion(parser, args.shell) for parser in parsers())
    return 0


def build_parser() -> OneLineParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog="ntp-completion",
        description="Print what makes a shell complete the ntp commands, for eval or source.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Of every command."""
    yield cli.build_parser({})
    for module in (compare_cli, doctor_cli, export_cli, heal_cli, plan_cli, report_cli, store_cli):
        yield module.build_parser()
    yield build_parser()


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of one command, in the language of `shell`, one of `SHELLS`. Changes the parser."""
    _prepare(parser)
    return shtab.complete(parser, shell) + "\n"


def _prepare(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which values are paths, and proposes one spelling of every option, the dashed one."""
    for action in parser._actions:
        action.option_strings = [option for option in action.option_strings if "_" not in option]
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _prepare(inner)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
        elif action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    sys.exit(main())
