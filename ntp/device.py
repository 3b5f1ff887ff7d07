"""Which device a worker computes on."""

import torch

from ntp.config import Config


def wants_gpu(config: Config) -> bool:
    """Whether workers compute on GPUs: `train.device: auto` takes them where there are any."""
    wanted = config.train.device
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The device of the rank at this place on its node, made torch's current one.

    `parallel.ranks_per_gpu` neighbours share a GPU.
    """
    if not wants_gpu(config):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank // config.parallel.ranks_per_gpu)
    torch.cuda.set_device(device)
    return device
