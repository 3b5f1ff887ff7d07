"""`ntp-launch CONFIG.yaml`: plan a job on the GPUs that are there, and run it.

Exit codes: 0 the run is complete; 1 a worker failed by its own error (or at all, where losses are not
survived); 2 bad input, nothing was trained; 3 what is left after a loss cannot go on; 4 one loss after
another without a committed step; 5 the control store is lost; 128 + n stopped by signal n. What goes wrong is
said on stderr, the reason of the end in its last line.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from ntp.config import load_config
from ntp.gpu_limits import check_gpu_computes
from ntp.plan import make_plan
from ntp.tokenizer import check_vocabulary, open_tokenizer
from ntp.topology import parse_failed, read_rank_map
from ntp_launcher.ending import ending
from ntp_launcher.flags import (
    LaunchError,
    Nodes,
    NothingToDoError,
    OneLineParser,
    add_torchrun_flags,
    nodes_from,
)
from ntp_launcher.job import Display, Job
from ntp_launcher.memory_view import parse_memory
from ntp_launcher.output import complain, output_is_dispensable, table_console
from ntp_launcher.paths import folder_name, path_name
from ntp_launcher.placement import block_size
from ntp_launcher.view import show

_COMMAND = "ntp-launch"
_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"  # read when torch is loaded


class Stopped(BaseException):
    """A signal arrived before there was an agent to handle it."""


def main(argv: Sequence[str] | None = None, worker_module: str = "ntp.worker") -> int:
    """Runs the command line; returns the exit code."""
    previous = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return ending(
            _COMMAND, lambda: run(build_parser(os.environ).parse_args(argv), os.environ, worker_module)
        )
    except Stopped as stop:
        complain(_COMMAND, f"stopped by {stop}")
        return 128 + signal.Signals[str(stop)].value
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = OneLineParser(
        prog=_COMMAND,
        description="Plan a training job on the GPUs that are there, and run it.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=path_name, metavar="CONFIG.yaml", help="the configuration")
    parser.add_argument(
        "--failed",
        action="append",
        default=[],
        metavar="RANKS",
        help="GPUs that do not exist: base-mesh ranks (3,5), coordinates (dp=0/tp=3) or @FILE, one a line "
        "(an empty file means none)",
    )
    parser.add_argument(
        "--rank-map",
        "--rank_map",
        type=path_name,
        metavar="FILE",
        help="the process rank at each coordinate, a JSON list, as ntp-plan advise writes it",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a config value, as in train.steps=10",
    )
    parser.add_argument(
        "--run-dir",
        "--run_dir",
        type=folder_name,
        metavar="DIR",
        help="where results go (default: runs/<time>)",
    )
    parser.add_argument(
        "--resume",
        metavar="WHAT",
        help="go on from a checkpoint: auto (the latest), a step, or the path of a checkpoint or run",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --resume: refuse a damaged checkpoint, do not take an older one",
    )
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="show the config and the plan, start nothing"
    )
    parser.add_argument(
        "--device-memory",
        "--device_memory",
        type=parse_memory,
        metavar="SIZE",
        help="with --dry-run: say whether the job fits devices of this memory, as in 80GiB",
    )
    parser.add_argument("--quiet", action="store_true", help="show losses and failures alone")
    parser.add_argument(
        "--log-format",
        "--log_format",
        choices=("text", "json"),
        default="text",
        help="what goes to stdout: text (a live view on a terminal), or a JSON object a line",
    )
    add_torchrun_flags(parser, environ)
    return parser


def run(args: argparse.Namespace, environ: Mapping[str, str], worker_module: str) -> int:
    """Checks everything that can be checked, then shows the plan or runs the job. Raises NtpError."""
    _check_pairs(args)
    nodes = nodes_from(args, environ)
    config = load_config(args.config, _overrides(args))
    parallel = config.parallel
    plan = make_plan(config, parse_failed(args.failed, parallel.dp, parallel.tp, parallel.standbys))
    block_size(parallel.world_size, nodes.nnodes, nodes.nproc_per_node)
    check_vocabulary(open_tokenizer(config.data.tokenizer), config.model.vocab_size)
    if args.dry_run:
        if config.train.device == "cuda":
            check_gpu_computes(config)
        show(config, plan, table_console(), args.device_memory)
        return 0
    job = Job(
        config,
        plan,
        args.run_dir,
        environ,
        worker_module,
        args.resume,
        args.strict,
        Display(args.quiet, args.log_format),
    )
    return _launch(job, nodes)


def _check_pairs(args: argparse.Namespace) -> None:
    """Raises LaunchError for an option that means nothing without another one."""
    if args.strict and args.resume is None:
        raise LaunchError("--strict is about the checkpoint of --resume, which is missing")
    if args.device_memory is not None and not args.dry_run:
        raise LaunchError("--device-memory is for --dry-run, which is missing")


def _overrides(args: argparse.Namespace) -> list[str]:
    """Config values from the command line; the rank map becomes one, so that every process has it."""
    if args.rank_map is None:
        return args.set
    return [*args.set, f"parallel.rank_map={read_rank_map(args.rank_map)}"]


def _launch(job: Job, nodes: Nodes) -> int:
    """Starts the agent. torch is imported here and not before: a dry run does without."""
    with _quiet_torch(job.config.log.level):
        from ntp_launcher import agent
        from ntp_launcher.preflight import check_node

    with output_is_dispensable(_COMMAND):
        try:
            check_node(job, nodes)
            code, message = agent.launch(job, nodes)
        except NothingToDoError as done:
            code, message = done.exit_code, str(done)
        if code:
            complain(_COMMAND, message)
        else:
            sys.stdout.write(f"{_COMMAND}: {message}\n")
    return code


@contextmanager
def _quiet_torch(level: str) -> Iterator[None]:
    """Where torch is imported in this context, a lost store is told without the stack of its C++ part.

    For this process alone: its workers' output goes to files, where more is better.
    """
    before = os.environ.get(_CPP_LEVEL)
    if before is None and level != "debug":
        os.environ[_CPP_LEVEL] = "ERROR"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CPP_LEVEL, None)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
