"""The analytic step time of one training configuration, in parts, to be held against a measured run."""

from collections.abc import Collection
from dataclasses import dataclass

from ntp.config import Config
from ntp.plan import make_plan
from ntp.planner.plans import Plans
from ntp.planner.study import Step, StudyError, job_of
from ntp.planner.work import (
    MicrobatchTime,
    Spread,
    exchange_time,
    heaviest_rank,
    microbatch_time,
    update_time,
)
from ntp.schedule import fold_of


@dataclass(frozen=True, slots=True)
class ReplicaTime:
    """Seconds on the busiest rank of a replica.

    Attributes:
        microbatch: of one; `compute` is of all of them.
        exchange: of gradients and parameters with the other replicas, not hidden.
        update: of adding gradients, also those of groups on the way, and renewing state and parameters.
    """

    index: int
    degree: int
    microbatches: int
    microbatch: MicrobatchTime
    compute: float
    exchange: float
    update: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step: the slowest replica's microbatches, then the slowest exchange and update.

    Attributes:
        link: what the exchange between replicas goes over.
        tokens: of the global batch.
        gpus: that compute.
    """

    replicas: tuple[ReplicaTime, ...]
    link: str
    tokens: int
    gpus: int
    overlap: float

    @property
    def compute(self) -> float:
        """Seconds until the last replica has its gradients."""
        return max(replica.compute for replica in self.replicas)

    @property
    def exchange(self) -> float:
        """Seconds of the slowest exchange that are not hidden."""
        return (1 - self.overlap) * max(replica.exchange for replica in self.replicas)

    @property
    def update(self) -> float:
        """Seconds of the slowest update."""
        return max(replica.update for replica in self.replicas)

    @property
    def step(self) -> float:
        """Seconds of the whole."""
        return self.compute + self.exchange + self.update


def predict(config: Config, failed: Collection[int], domain_size: int, step: Step) -> Prediction:
    """Count what a step of this configuration costs.

    Args:
        failed: process ranks that do not exist.
        domain_size: ranks that share NVLink: a job that fits into them exchanges over it.

    Raises:
        PlanError: no layout can run. StudyError: `step` is not analytic.
    """
    if step.times != "analytic":
        raise StudyError(f"times: {step.times} has nothing to predict from; it has to be analytic")
    plan, plans, job = make_plan(config, failed), Plans(config), job_of(config)
    nvlink = len(plan.workers) <= domain_size
    rate = step.gpu.copies_gbytes_s if nvlink else step.gpu.network_gbytes_s
    nodes = [len(fold_of(replica.groups, plan.groups).nodes) for replica in plan.replicas]
    dp = len(plan.replicas)
    found: list[ReplicaTime] = []
    for replica, own in zip(plan.replicas, nodes, strict=True):
        rank = heaviest_rank(job, plans, replica.degree)
        groups = len(replica.groups)
        spread = Spread(dp, plan.copies, groups, nodes=own, all_nodes=sum(nodes), uniform=plan.is_uniform)
        microbatch = microbatch_time(step, job, rank, replica.degree)
        found.append(
            ReplicaTime(
                index=replica.index,
                degree=replica.degree,
                microbatches=len(replica.microbatches),
                microbatch=microbatch,
                compute=len(replica.microbatches) * microbatch.total(step.overlap),
                exchange=exchange_time(rank, spread, rate),
                update=update_time(rank, spread, step.gpu),
            )
        )
    tokens = config.train.global_batch * config.train.seq_len
    link = "NVLink" if nvlink else "the network"
    return Prediction(tuple(found), link, tokens, len(plan.workers), step.overlap)
