"""Calls into torch.distributed that begin and end a process's part in one generation of a job.

The only module that knows how torch versions 2.11 to 2.14 differ here.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ntp.collectives import PeerLostError, TorchFabric
from ntp.control import Control

_BUILD_TIMEOUT = timedelta(seconds=20)
"""For building groups: everyone has arrived by then, so a longer silence is a loss."""


def connect(host: str, port: int, prefix: str, timeout_s: float) -> Store:
    """A connection of its own to the job's store; keys are relative to `prefix`."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(prefix, store)


def load_nccl(device: torch.device) -> None:
    """Use NCCL once, in a world of one: the first use in a process takes longer than any later one."""
    store = HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=_BUILD_TIMEOUT)
    try:
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    finally:
        dist.destroy_process_group()


@contextmanager
def joined_generation(
    store: Store,
    generation: int,
    world: Sequence[int],
    rank: int,
    device: torch.device,
    control: Control,
    timeout_s: float,
    through_peers: bool = False,
    shares_device: bool = False,
) -> Iterator[TorchFabric]:
    """Take part in one generation; on leaving, give its connections up so that no peer waits for this rank.

    Args:
        world: every process rank that takes part, ascending; `rank` is this one's.
        device: decides the backend, NCCL for a GPU, else gloo.
        control: is asked before every collective, and ends what waits on a GPU when the generation is over.
        timeout_s: of one collective.
        through_peers: see `TorchFabric`.
        shares_device: other ranks have the same GPU, which NCCL refuses: gloo takes its place.

    Raises:
        PeerLostError: somebody went before the groups were built.
    """
    backend = "nccl" if device.type == "cuda" and not shares_device else "gloo"
    hook = sys.excepthook
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"groups/{generation}", store),
            rank=list(world).index(rank),
            world_size=len(world),
            timeout=_BUILD_TIMEOUT,
        )
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error
    sys.excepthook = hook  # torch's would stack up, each with a rank of its own generation before every line
    fabric = TorchFabric(
        world, rank, control.check, _BUILD_TIMEOUT, timedelta(seconds=timeout_s), device, through_peers
    )
    if device.type == "cuda":
        control.on_over = fabric.abort
    try:
        yield fabric
    except BaseException:
        fabric.abort()  # what waits on the device for a lost peer would hold up the rest
        raise
    finally:
        control.on_over = lambda: None
        fabric.close()
        dist.destroy_process_group()
