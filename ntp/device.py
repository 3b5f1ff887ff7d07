"""Which device a worker computes on."""

import torch

from ntp.config import Config
from ntp.errors import ConfigError

_ON_CPU = "--set train.device=cpu"


def wants_gpu(config: Config) -> bool:
    """Whether workers compute on GPUs: `train.device: auto` takes them where there are any."""
    wanted = config.train.device
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())


def check_gpu_computes(config: Config) -> None:
    """Raises ConfigError where the job goes to GPUs and the kernels lack what it needs."""
    if not wants_gpu(config):
        return
    from ntp_kernels.attention import HEAD_SIZES  # needs Triton

    dtype, size = config.train.dtype, config.model.head_dim
    if dtype != "bfloat16":
        raise ConfigError(f"train.dtype={dtype}: GPUs compute in bfloat16; or train on processors: {_ON_CPU}")
    if size not in HEAD_SIZES:
        sizes = " or ".join(map(str, HEAD_SIZES))
        raise ConfigError(f"model.head_dim={size}: on GPUs it is {sizes}; or train on processors: {_ON_CPU}")


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The device of the rank at this place on its node, made torch's current one.

    `parallel.ranks_per_gpu` neighbours share a GPU.
    """
    if not wants_gpu(config):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank // config.parallel.ranks_per_gpu)
    torch.cuda.set_device(device)
    return device
