"""What a look at this node tells before the nodes meet: what would stop every worker is said once, here."""

from pathlib import Path

import torch

from ntp.data import datasets_of
from ntp.device import wants_gpu
from ntp.gpu_limits import check_gpu_computes
from ntp.hugging_face import opened
from ntp_launcher.exporters import check_exporters
from ntp_launcher.flags import LaunchError, Nodes
from ntp_launcher.job import Job, proposed_run_dir
from ntp_launcher.placement import block_size, local_ranks
from ntp_launcher.resumption import check_resumption


def check_node(job: Job, nodes: Nodes) -> None:
    """Raises NtpError for a device, a folder, weights, a checkpoint or data that this node does not have.

    Exporters are looked at where the node may come to lead, what to resume where it is the only one: of
    several the leader looks when they have met, so that all hear of it. Raises NothingToDoError where the run
    is complete.
    """
    _check_devices(job, nodes)
    _check_folder("--log-dir", nodes.log_dir)
    _check_folder("checkpoint.dir", job.config.checkpoint.dir if job.config.checkpoint.every else None)
    if nodes.node_rank in (0, None):
        check_exporters(job.config.log)
    is_new = job.resume is None
    if nodes.nnodes == 1:
        is_new = check_resumption(job, Path(job.run_dir or proposed_run_dir(job))) is None
    if job.config.model.init_from is not None and is_new:
        with opened(Path(job.config.model.init_from), job.config.model):
            pass
    datasets_of(job.config)


def _check_devices(job: Job, nodes: Nodes) -> None:
    parallel = job.config.parallel
    if job.config.train.device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            f"train.device=cuda: torch {torch.__version__} sees no GPU on this node; see ntp-doctor"
        )
    if not wants_gpu(job.config):
        return
    check_gpu_computes(job.config)
    node = 0 if nodes.nnodes == 1 else nodes.node_rank
    if node is None:
        return
    size = block_size(parallel.world_size, nodes.nnodes, nodes.nproc_per_node)
    places = local_ranks(node, size, job.plan.world).values()
    needed, found = max(places, default=-1) // parallel.ranks_per_gpu + 1, torch.cuda.device_count()
    if needed > found:
        raise LaunchError(
            f"the ranks of this node need {needed} GPUs, torch sees {found}; "
            "parallel.ranks_per_gpu lets ranks share them, to try failures"
        )


def _check_folder(setting: str, folder: str | None) -> None:
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{setting} {folder!r} cannot be made: {error.strerror}") from None
