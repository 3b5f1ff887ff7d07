"""torchrun's options, in both spellings, with `PET_*` variables as defaults, turned into one value.

What torchrun leaves to chance is fixed here: a single node meets on a free port of its own (torchrun's
default port collides with the next job), and `--node-rank` counts with every backend. `--nnodes` is one
number: a job whose node count may change is asked for with standbys. Under Slurm a node's rank is Slurm's.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ntp.errors import NtpError
from ntp_launcher.paths import folder_name

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class LaunchError(NtpError):
    """The nodes, processes or rendezvous that were asked for cannot run the job."""


class NothingToDoError(LaunchError):
    """What was asked for has been done before."""

    exit_code = 0


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line on stderr, like every other bad input's."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2 and one line."""
        self.exit(2, f"{self.prog}: error: {message}\n")


@dataclass(frozen=True, slots=True)
class Nodes:
    """How agents find each other and what each may start.

    Attributes:
        node_rank: which block of base-mesh ranks this node runs; None = in order of arrival.
        nproc_per_node: base-mesh ranks of one node; None = the mesh spread evenly.
        rdzv_endpoint: host[:port] of the rendezvous; port 0 = any free one.
        control_endpoint: host[:port] of a store outside (`ntp-store`); None = node 0 has one.
        local_addr: the address under which other nodes reach this one; None = its host name.
        tee: streams copied to the terminal per local rank (1 stdout, 2 stderr, 3 both), the key -1 for all;
            None = both streams of the lowest live rank.
    """

    nnodes: int
    node_rank: int | None
    nproc_per_node: int | None
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: Mapping[str, str]
    control_endpoint: str | None
    local_addr: str | None
    max_restarts: int
    monitor_interval: float
    log_dir: str | None
    tee: Mapping[int, int] | None

    @property
    def is_on_one_host(self) -> bool:
        """Whether every node is an agent of this very host."""
        return _is_local(self.rdzv_endpoint)


def add_torchrun_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Adds torchrun's options to `parser`; `environ` holds the `PET_*` defaults."""
    group = parser.add_argument_group("nodes and processes (as torchrun; PET_* variables give defaults)")

    def add(name: str, help: str, **kwargs: object) -> None:
        default = environ.get("PET_" + name.upper(), kwargs.pop("default", None))
        spellings = dict.fromkeys(["--" + name.replace("_", "-"), "--" + name])
        group.add_argument(*spellings, dest=name, help=help, default=default, **kwargs)  # pyright: ignore[reportArgumentType]

    add("nnodes", "number of nodes", type=_node_count, default="1")
    add(
        "node_rank",
        "which block of ranks this node runs (default: Slurm's, else order of arrival)",
        type=_count,
    )
    add("nproc_per_node", "base-mesh ranks on each node (default: spread evenly)", type=_process_count)
    add("rdzv_backend", "rendezvous backend (default: c10d)")
    add("rdzv_endpoint", "rendezvous endpoint, HOST[:PORT]", type=_endpoint)
    add("rdzv_id", "job id, equal on all nodes", default="ntp")
    add("rdzv_conf", "further rendezvous settings, key=value,...", type=_settings, default="")
    add(
        "control_endpoint",
        "HOST[:PORT] of an ntp-store for this job (default: node 0 has one)",
        type=_endpoint,
    )
    add("master_addr", "host of the rendezvous, another spelling of its endpoint")
    add("master_port", "port that goes with --master-addr", type=port_number, default="29500")
    add("local_addr", "address under which other nodes reach this one")
    add("max_restarts", "restarts of all workers before the job fails", type=_count, default="0")
    add("monitor_interval", "seconds between looks at the workers", type=_seconds, default="0.1")
    add("log_dir", "directory of the worker logs (default: RUN_DIR/logs)", metavar="DIR", type=folder_name)
    add("tee", "streams to show: 0 to 3, or LOCAL_RANK:0..3,... (default: the lowest live rank)", type=_tee)
    group.add_argument(
        "--standalone",
        action="store_true",
        default=environ.get("PET_STANDALONE", "0") == "1",
        help="one node, with a rendezvous of its own (what one node does anyway)",
    )


def nodes_from(args: argparse.Namespace, environ: Mapping[str, str]) -> Nodes:
    """The parsed options as one value; `environ` may hold a scheduler's numbering of the nodes.

    Raises LaunchError for a combination that cannot work.
    """
    backend, endpoint = args.rdzv_backend, args.rdzv_endpoint
    if endpoint is None and args.master_addr and not args.standalone:
        endpoint, backend = f"{args.master_addr}:{args.master_port}", backend or "static"
    if args.standalone and args.nnodes > 1:
        raise LaunchError(f"--standalone is for one node, found --nnodes {args.nnodes}")
    if args.nnodes > 1 and endpoint is None:
        raise LaunchError(f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, the same on every node")
    if args.node_rank is not None and args.node_rank >= args.nnodes:
        raise LaunchError(f"--node-rank {args.node_rank} is out of range for --nnodes {args.nnodes}")
    if backend == "static" and args.max_restarts:
        raise LaunchError(f"--max-restarts {args.max_restarts} needs a rendezvous backend other than static")
    if endpoint is None and backend not in (None, "c10d", "static") and not args.standalone:
        raise LaunchError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT")
    if args.standalone or endpoint is None:
        backend, endpoint = "c10d", "localhost:0"
    return Nodes(
        nnodes=args.nnodes,
        node_rank=_slurm_rank(args.nnodes, environ) if args.node_rank is None else args.node_rank,
        nproc_per_node=args.nproc_per_node,
        rdzv_backend=backend or "c10d",
        rdzv_endpoint=endpoint,
        rdzv_id=args.rdzv_id,
        rdzv_conf=args.rdzv_conf,
        control_endpoint=args.control_endpoint,
        local_addr=args.local_addr or ("localhost" if _is_local(endpoint) else None),
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        log_dir=args.log_dir,
        tee=args.tee,
    )


def _slurm_rank(nnodes: int, environ: Mapping[str, str]) -> int | None:
    """This node's place in a job step of as many nodes. Raises LaunchError for several agents on a node."""
    if environ.get("SLURM_STEP_NUM_NODES") != str(nnodes):
        return None
    agents = environ.get("SLURM_STEP_NUM_TASKS", str(nnodes))
    if agents != str(nnodes):
        raise LaunchError(
            f"srun starts {agents} agents on {nnodes} node{'s' * (nnodes > 1)}, one a node is needed: "
            f"srun --ntasks-per-node=1"
        )
    return int(environ["SLURM_NODEID"])


def _is_local(endpoint: str) -> bool:
    return endpoint.startswith("[::1]") or endpoint.partition(":")[0] in _LOCAL_HOSTS


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type for options: whole numbers from `least` to `most`, both included."""
    span = f"of {least} or more" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= (most or int(text)):
            raise argparse.ArgumentTypeError(f"expected a number {span}, found {text!r}")
        return int(text)

    return parse


_count = number(0)
port_number = number(0, 65535)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or float(text) < 0.01:
        raise argparse.ArgumentTypeError(f"expected seconds of 0.01 or more, found {text!r}")
    return float(text)


def _node_count(text: str) -> int:
    least, colon, most = text.partition(":")
    if colon and least != most:
        raise argparse.ArgumentTypeError(
            f"a range of nodes is not supported, found {text!r}; give one number"
        )
    if _count(least) < 1:
        raise argparse.ArgumentTypeError(f"expected at least one node, found {text!r}")
    return _count(least)


def _process_count(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, or auto, found {text!r}")
    return int(text)


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/\s\[\]]+)(:[0-9]{1,5})?", text):
        raise argparse.ArgumentTypeError(f"expected HOST or HOST:PORT, found {text!r}")
    return text


def _settings(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for key, equals, value in pairs:
        if not (key.strip() and equals):
            raise argparse.ArgumentTypeError(f"expected key=value,..., found {key + equals + value!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _tee(text: str) -> dict[int, int]:
    """`3` for all local ranks (key -1), or `0:3,12:1`."""
    if re.fullmatch(r"[0-3]", text):
        return {-1: int(text)}
    if not re.fullmatch(r"([0-9]{1,6}:[0-3],)*[0-9]{1,6}:[0-3]", text):
        raise argparse.ArgumentTypeError(f"expected 0 to 3, or LOCAL_RANK:0..3,..., found {text!r}")
    return {
        int(local): int(streams) for local, _, streams in (item.partition(":") for item in text.split(","))
    }
