"""Run a function on simulated tensor-parallel ranks, without a plan."""

import threading
from collections.abc import Callable
from typing import TypeVar

from ntp.collectives import Group
from ntp.testing import SimulatedFabric, SimulatedWorld

T = TypeVar("T")


def on_ranks(body: Callable[[Group], T], degree: int) -> list[T]:
    """Run `body` on every rank of a group of `degree` threads and return the results by rank."""
    world, results = SimulatedWorld(30.0), {}

    def run(rank: int) -> None:
        try:
            group = SimulatedFabric(world, rank).group(range(degree))
            assert group is not None
            results[rank] = body(group)
        except BaseException as error:
            world.fail(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(degree)]
