"""A worker's environment: everything that it learns from the launcher, as a pure function."""

from dataclasses import dataclass
from pathlib import Path

from ntp_launcher.job import Job


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What the agents have agreed on. `agent_store`: a store listens at the master address already."""

    master_addr: str
    master_port: int
    agent_store: bool
    run_id: str
    group_rank: int
    group_size: int
    local_size: int
    attempt: int
    max_restarts: int


def worker_environment(
    job: Job, run_dir: Path, rank: int, local_rank: int, rendezvous: Rendezvous, incarnation: int = 0
) -> dict[str, str]:
    """The launcher's environment, torchrun's variables, and ours.

    RANK is the base-mesh rank and WORLD_SIZE counts failed ranks too; LOCAL_RANK is the place (the GPU) on
    the node. NTP_CONFIG is the resolved configuration as JSON, NTP_FAILED the failed ranks with commas,
    NTP_RESUME what to go on from ("" = nothing; after a restart of all workers the latest checkpoint),
    NTP_STRICT 1 where a damaged checkpoint is refused.
    """
    # More threads would cut reductions elsewhere; NVLink multicast sums in an order of its own.
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "NCCL_NVLS_ENABLE": "0"}
    world_size = str(job.config.parallel.world_size)
    return {
        **defaults,
        **job.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(rendezvous.local_size),
        "GROUP_RANK": str(rendezvous.group_rank),
        "GROUP_WORLD_SIZE": str(rendezvous.group_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": rendezvous.master_addr,
        "MASTER_PORT": str(rendezvous.master_port),
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(rendezvous.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(rendezvous.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(rendezvous.agent_store),
        "NTP_INCARNATION": str(incarnation),
        "NTP_RUN_DIR": str(run_dir),
        "NTP_CONFIG": job.config.model_dump_json(),
        "NTP_FAILED": ",".join(str(rank) for rank in job.plan.failed),
        "NTP_RESUME": "auto" if rendezvous.attempt and job.config.checkpoint.every else job.resume or "",
        "NTP_STRICT": "1" if job.strict else "0",
    }
