"""A rehearsal: a worker does once, alone, what it may have to do while others wait for it.

The first step of a process on a GPU takes seconds: kernels are compiled or read from disk, loaded, recorded
in graphs. When a rank comes back, all others would wait for that; after a loss, for kernels of the degrees
that it brings. So each worker, before it says that it is ready, runs two microbatches of a few layers among
mirrored peers (`ntp.mirror`): in its own role, and in each that the loss of any one rank could give it. Sizes
are those of the real model but for the number of layers; nothing of it is kept.

It is not done in the background of training: loading a kernel may wait for all that runs on the device, one
that waits for a peer included, and the few layers may find no room beside the model.
"""

import gc
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from ntp.collectives import build_mesh
from ntp.config import Config
from ntp.data import Datasets
from ntp.errors import PlanError
from ntp.mirror import MirrorFabric
from ntp.plan import Plan, make_plan
from ntp.trainer import Trainer

_LAYERS = 2
"""The first has no residual stream to add to."""

_MICROBATCHES = 2
"""The first runs eagerly, the second is recorded."""


@dataclass(frozen=True, slots=True, order=True)
class Role:
    """A tensor-parallel position in a replica of some degree."""

    degree: int
    position: int


def roles(config: Config, failed: Collection[int], rank: int) -> list[Role]:
    """What `rank` may have to be: what the plan gives it first, then what it gives after one more loss.

    Empty for a standby that no single loss puts to work.

    Args:
        failed: ranks that do not exist.
    """
    found: dict[Role, None] = {}
    for lost in [None, *_losses(config, failed, rank)]:
        try:
            plan = make_plan(config, {*failed} if lost is None else {*failed, lost})
        except PlanError:
            continue
        if rank in plan.workers:
            members = plan.replica_of(rank).members
            found[Role(len(members), members.index(rank))] = None
    return list(found)


def rehearse(config: Config, role: Role, datasets: Datasets, device: torch.device) -> bool:
    """Train a few layers for one step in this role, without peers; what it allocates is given back.

    Returns:
        False if the device had no room for it.
    """
    short = _shortened(config, role.degree)
    fabric = MirrorFabric(role.position, device, config.parallel.exchange == "peer")
    try:
        _step(short, make_plan(short), role.position, fabric, datasets, device)
        had_room = True
    except torch.OutOfMemoryError:
        had_room = False
    finally:
        fabric.close()
    _give_back(device)
    return had_room


def _losses(config: Config, failed: Collection[int], rank: int) -> Iterator[int]:
    """Ranks whose loss could matter to `rank`: its own replica's, and of each other one the first."""
    plan = make_plan(config, failed)
    for replica in plan.replicas:
        mine = rank in replica.members
        yield from (other for other in replica.members[: None if mine else 1] if other != rank)


def _step(
    config: Config, plan: Plan, rank: int, fabric: MirrorFabric, datasets: Datasets, device: torch.device
) -> None:
    mesh = build_mesh(plan, rank, fabric)
    assert mesh is not None
    trainer = Trainer(config, plan, mesh, datasets, device, initialise=False)
    trainer.optimizer.master.normal_(std=config.model.initializer_range)
    trainer.publish()
    tokens = 0
    for index in trainer.ddp.microbatches():
        batch = trainer.batch(1, index)
        trainer.model.loss(batch).sum().backward()
        tokens += batch.target_tokens
    gradients = trainer.ddp.sync(trainer.optimizer.places)
    trainer.optimizer.commit(gradients, tokens, config.optimizer.lr, step=1)
    mesh.workers.synchronize()
    trainer.retire()


def _shortened(config: Config, degree: int) -> Config:
    """One replica of this degree, with few layers and microbatches."""
    layers = min(config.model.num_hidden_layers, _LAYERS)
    model = config.model.model_copy(update={"num_hidden_layers": layers})
    mesh = {"dp": 1, "tp": degree, "standbys": 0, "min_degree": 1, "rank_map": None}
    batch = {"global_batch": _MICROBATCHES * config.train.micro_batch, "grad_group": 1}
    return config.model_copy(
        update={
            "model": model,
            "parallel": config.parallel.model_copy(update=mesh),
            "train": config.train.model_copy(update=batch),
        }
    )


def _give_back(device: torch.device) -> None:
    """Return memory, once no frame or error holds any more; graphs and their model refer to each other."""
    gc.collect()
    if device.type == "cuda":
        from ntp.peer_memory import free_retired  # needs CUDA

        torch.cuda.synchronize(device)
        free_retired()
        torch.cuda.empty_cache()
