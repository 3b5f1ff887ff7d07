"""Microbatches of whole sequences, one document each: stock attention knows no borders."""

import torch
from torch import Tensor

from ntp.data import Batch


def whole_sequences(inputs: Tensor, targets: Tensor, seq_len: int) -> Batch:
    """A batch of ids i64 [M], every one of them with a target; M is a multiple of `seq_len`."""
    sequences = inputs.numel() // seq_len
    documents = torch.arange(sequences, dtype=torch.int32).repeat_interleave(seq_len)
    positions = torch.arange(seq_len, dtype=torch.int32).repeat(sequences)
    return Batch(inputs, targets, documents, positions, inputs.numel())
