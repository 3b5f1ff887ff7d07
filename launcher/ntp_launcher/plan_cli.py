"""`ntp-plan`: what failures cost a cluster (`simulate`), the best layout for one failure (`advise`), and what
a step of a job should take (`predict`).

Exit codes: 0 done, 2 bad input. Whatever goes wrong is said in one line on stderr.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ntp.config import load_config
from ntp.planner.advice import Layout, advise
from ntp.planner.assumptions import gpu_assumptions, step_assumptions
from ntp.planner.prediction import predict
from ntp.planner.report import to_json
from ntp.planner.simulation import pieces, run
from ntp.planner.study import Step, load_step, load_study
from ntp.topology import parse_failed
from ntp_launcher.ending import ending
from ntp_launcher.flags import LaunchError, OneLineParser, number
from ntp_launcher.output import table_console
from ntp_launcher.paths import path_name
from ntp_launcher.plan_plots import check_plots, write_plots
from ntp_launcher.plan_view import show_advice, show_assumptions, show_prediction, show_result

_NVLINK_RANKS = 8  # of one host, as most are built


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return ending("ntp-plan", lambda: _plan(build_parser().parse_args(argv)))


def _plan(args: argparse.Namespace) -> int:
    return {"simulate": _simulate, "advise": _advise, "predict": _predict}[args.command](args)


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = OneLineParser(prog="ntp-plan", description="What failures cost, and which layout loses least.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    simulate = commands.add_parser("simulate", help="policies against failures of a cluster")
    simulate.add_argument(
        "study", type=path_name, metavar="CLUSTER.yaml", help="cluster, job, failures and policies"
    )
    simulate.add_argument("--json", type=path_name, metavar="FILE", help="write the result as JSON")
    simulate.add_argument("--plots", type=path_name, metavar="DIR", help="write plots (needs matplotlib)")
    advice = commands.add_parser("advise", help="the best layout for a set of failed GPUs")
    advice.add_argument(
        "--rank-map", type=path_name, metavar="FILE", help="write the rank map for ntp-launch --rank-map"
    )
    prediction = commands.add_parser("predict", help="the step time of a job by counting, in parts")
    for command, domain in ((advice, "default: tp"), (prediction, "default: 8")):
        command.add_argument(
            "config", type=path_name, metavar="CONFIG.yaml", help="the training configuration"
        )
        command.add_argument(
            "--failed", action="append", default=[], metavar="RANKS", help="as ntp-launch --failed"
        )
        command.add_argument(
            "--domain-size",
            type=number(1),
            metavar="N",
            help=f"consecutive ranks that share NVLink ({domain})",
        )
        command.add_argument(
            "--step",
            type=path_name,
            metavar="FILE",
            help="YAML with the keys of a cluster file's step section",
        )
    for command in (simulate, advice, prediction):
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the file"
        )
    return parser


def _simulate(args: argparse.Namespace) -> int:
    study = load_study(args.study, args.set)
    _check_file(args.json)
    if args.plots:
        check_plots(args.plots)
    with _progress(pieces(study)) as advance:
        result = run(study, advance)
    show_result(result, table_console())
    if args.json:
        _write(args.json, json.dumps(to_json(result)))
    if args.plots:
        for path in write_plots(result, args.plots):
            sys.stdout.write(f"wrote {path}\n")
    return 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, else nothing; yields what moves it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda: progress.advance(task)


def _advise(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set)
    parallel = config.parallel
    failed = parse_failed(args.failed, parallel.dp, parallel.tp, parallel.standbys)
    step = load_step(args.step) if args.step else Step()
    _check_file(args.rank_map)
    advice = advise(config, failed, args.domain_size or parallel.tp, step)
    console = table_console()
    show_assumptions(step_assumptions(step, advice.times, parallel.tp), console)
    show_advice(advice, console)
    if args.rank_map:
        _write(args.rank_map, json.dumps(list(advice.best.rank_map)) + "\n")
        sys.stdout.write(_command(args, advice.best))
    return 0


def _predict(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set)
    parallel = config.parallel
    failed = parse_failed(args.failed, parallel.dp, parallel.tp, parallel.standbys)
    step = load_step(args.step) if args.step else Step()
    console = table_console()
    found = predict(config, failed, args.domain_size or _NVLINK_RANKS, step)
    show_assumptions([gpu_assumptions(step)], console)
    show_prediction(found, console)
    return 0


def _command(args: argparse.Namespace, best: Layout) -> str:
    """How to launch the best layout."""
    words = ["ntp-launch", args.config]
    words += [word for failed in args.failed for word in ("--failed", failed)]
    words += [word for override in args.set for word in ("--set", override)]
    words += ["--set", f"parallel.min_degree={best.min_degree}", "--rank-map", args.rank_map]
    return shlex.join(words) + "\n"


def _check_file(path: str | None) -> None:
    """Raises LaunchError for a file that could not be written after the work; changes none that is there."""
    if path is None:
        return
    is_new = not Path(path).exists()
    try:
        with Path(path).open("a"):
            pass
        if is_new:
            Path(path).unlink()
    except OSError as error:
        raise LaunchError(f"cannot write {path!r}: {error.strerror}") from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write {path!r}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
