"""Calls into torch.distributed that start and end a process's part in a job.

The only module that knows how torch versions 2.11 to 2.14 differ here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from torch.distributed.distributed_c10d import PrefixStore, Store

from ntp.collectives import TorchFabric


@contextmanager
def joined_world(
    world: Sequence[int], rank: int, device: torch.device, timeout_s: float
) -> Iterator[tuple[TorchFabric, Store]]:
    """Join the job at MASTER_ADDR:MASTER_PORT and leave it in the end.

    Args:
        world: every process rank that takes part, ascending; `rank` is this one's.
        device: decides the backend, gloo or NCCL.
        timeout_s: of one collective.
    """
    place, size = list(world).index(rank), len(world)
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous("env://", rank=place, world_size=size, timeout=timeout))
    store.set_timeout(timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("ntp", store), rank=place, world_size=size, timeout=timeout
    )
    try:
        yield TorchFabric(world, rank), store
    finally:
        dist.destroy_process_group()
