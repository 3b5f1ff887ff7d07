"""What the kernels for GPUs do not compute, told before anything starts. Pure: needs no torch."""

from ntp.config import Config
from ntp.errors import ConfigError

HEAD_SIZES = (64, 128)
"""For which there are attention kernels."""

_ON_CPU = "--set train.device=cpu"


def check_gpu_computes(config: Config) -> None:
    """Raises ConfigError for a job on GPUs that asks for what their kernels lack."""
    dtype, size = config.train.dtype, config.model.head_dim
    if dtype != "bfloat16":
        raise ConfigError(f"train.dtype={dtype}: GPUs compute in bfloat16; or train on processors: {_ON_CPU}")
    if size not in HEAD_SIZES:
        sizes = " or ".join(map(str, HEAD_SIZES))
        raise ConfigError(f"model.head_dim={size}: on GPUs it is {sizes}; or train on processors: {_ON_CPU}")
