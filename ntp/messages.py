"""Small JSON values told to every rank of a group: decisions, failures, what was written where."""

import json
from typing import Any

import torch

from ntp.collectives import Group


def gather_values(group: Group, value: object) -> list[Any]:
    """The JSON value of every rank, in group order; collective over a group that carries host tensors."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = group.all_gather(torch.tensor([text.numel()]), [1] * group.size).tolist()
    texts = group.all_gather(text, sizes).split(sizes)
    return [json.loads(bytes(text.tolist())) for text in texts]


def leaders_value(group: Group, value: object) -> Any:
    """The JSON value of the rank that leads; collective like `gather_values`."""
    return gather_values(group, value)[group.ranks.index(min(group.ranks))]
