"""From the last hidden states of a batch to the rows of its output."""

from __future__ import annotations

import torch

from tessera.nn.sequences import Sequences
from tessera.nn.spec import Pooling


def pool(hidden: torch.Tensor, sequences: Sequences, pooling: Pooling) -> torch.Tensor:
    """``[tokens, width]`` of any float type to float32: a row for each sequence, or with ``none`` token."""
    if pooling == "none":
        return hidden.float()
    if pooling == "first":
        return sequences.first(hidden).float()
    if pooling == "last":
        return sequences.last(hidden).float()
    return sequences.mean(hidden)
