"""Which device a worker computes on."""

import torch

from ntp.config import Config


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The device of the rank at this place on its node, made torch's current one.

    `train.device: auto` takes a GPU where there is one; `parallel.ranks_per_gpu` neighbours share each.
    """
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank // config.parallel.ranks_per_gpu)
    torch.cuda.set_device(device)
    return device
