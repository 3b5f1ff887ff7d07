"""Entry point of a worker process, and the only reader of its environment.

The launcher sets RANK (the base-mesh rank), LOCAL_RANK, MASTER_ADDR, MASTER_PORT, NTP_CONFIG (JSON),
TORCHELASTIC_RUN_ID, NTP_RUN_DIR, NTP_RESUME, NTP_STRICT and NTP_INCARNATION. The rest comes through the store
at that address: which ranks take part is the newest generation (`ntp.protocol`); what follows from it every
worker plans for itself.
"""

import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from ntp.collectives import TorchFabric
from ntp.config import Config, parse_config
from ntp.control import Control
from ntp.data import datasets_of
from ntp.device import choose_device
from ntp.device_proof import prove
from ntp.errors import NtpError
from ntp.injector import FaultyWatch
from ntp.life import Job, Life
from ntp.plan import Plan
from ntp.process_groups import connect, joined_generation, load_nccl
from ntp.protocol import Phase, failure_key
from ntp.rehearsal import rehearse, roles


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the launcher tells a worker."""

    rank: int
    local_rank: int
    incarnation: int
    config: Config
    store_host: str
    store_port: int
    store_prefix: str
    run_dir: Path
    resume: str | None
    strict: bool

    @classmethod
    def from_environment(cls) -> "Surroundings":
        """Reads what `ntp_launcher.environment` set. Raises KeyError outside of a launcher."""
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            incarnation=int(os.environ.get("NTP_INCARNATION", "0")),
            config=parse_config(os.environ["NTP_CONFIG"]),
            store_host=os.environ["MASTER_ADDR"],
            store_port=int(os.environ["MASTER_PORT"]),
            store_prefix=f"ntp/{os.environ['TORCHELASTIC_RUN_ID']}",
            run_dir=Path(os.environ["NTP_RUN_DIR"]),
            resume=os.environ.get("NTP_RESUME") or None,
            strict=os.environ.get("NTP_STRICT") == "1",
        )

    def connect(self) -> Store:
        """A connection to the job's store."""
        return connect(self.store_host, self.store_port, self.store_prefix, self.config.train.timeout_s)


_log = logging.getLogger(__name__)

_CONNECTIONS = "32"
"""Queues of a GPU. Streams that share one wait for each other, and some of ours wait for peers."""


def main() -> int:
    """Run this worker to the end of training. SIGINT ends it as SIGTERM does, without a traceback.

    Returns:
        The exit code. What a user can cause is said in one line.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _work()
    except NtpError as error:
        with suppress(OSError):  # a full disk; the launcher has it too
            sys.stderr.write(f"{_in_short(error)}\n")
        return 1
    return 0


def _work() -> None:
    here = Surroundings.from_environment()
    torch.set_num_threads(1)  # a second thread would cut reductions elsewhere
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
    device = choose_device(here.config, here.local_rank)
    control = Control(here.connect, here.rank)
    watch = FaultyWatch(control, here.config.faults if here.incarnation == 0 else (), here.rank)
    watch.enter(Phase.STARTUP, 0)
    job = Job(
        config=here.config,
        rank=here.rank,
        run_dir=here.run_dir,
        resume=here.resume,
        strict=here.strict,
        device=device,
        datasets=datasets_of(here.config, cache_dir=here.run_dir / "tokens"),
        say=_say,
        watch=watch,
        proof=prove(device),
    )
    elastic, is_alone = here.config.elastic, here.config.parallel.ranks_per_gpu == 1
    if device.type == "cuda" and is_alone and elastic.enabled and elastic.rehearse:
        _rehearse(here, control.absent(), job)
    groups = here.connect()

    def join(plan: Plan) -> AbstractContextManager[TorchFabric]:
        parallel = here.config.parallel
        return joined_generation(
            groups,
            plan.generation,
            plan.world,
            here.rank,
            device,
            control,
            here.config.train.timeout_s,
            through_peers=parallel.exchange == "peer",
            shares_device=parallel.ranks_per_gpu > 1,
        )

    try:
        Life(job, control, join).run()
    except NtpError as error:
        control.put(failure_key(here.rank), _in_short(error))
        raise
    finally:
        control.close()


def _rehearse(here: Surroundings, failed: set[int], job: Job) -> None:
    """Bring up, before the launcher hears that this worker is ready, what others would wait for."""
    load_nccl(job.device)
    for role in roles(here.config, failed, here.rank):
        if not rehearse(here.config, role, job.datasets, job.device):
            _log.warning("rank %d has no room to rehearse degree %d", here.rank, role.degree)


def _in_short(error: NtpError) -> str:
    return f"{type(error).__name__}: {error}"


def _say(line: str) -> None:
    """A line for the log; a full disk is not worth a worker, and the launcher is told the line too."""
    with suppress(OSError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
