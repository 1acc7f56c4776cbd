"""Fills blocks with the weights of another library's module, or with random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tessera.checkpoint.loading import stored_names
from tessera.nn.layer import SOURCES


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter numbers that show a mistake: norms far from 1, biases far from 0."""
    generator = torch.Generator().manual_seed(seed)
    for value in module.parameters():
        scale = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.5
        value.copy_(torch.randn(value.shape, generator=generator) * scale + (value.ndim == 1) * 0.7)


@torch.no_grad()
def copy(block: nn.Module, module: nn.Module, names: Mapping[str, Sequence[str]] | None = None) -> None:
    """Take ``module``'s weights over; ``names`` says what it calls a part of ``block``."""
    stored = {f".{name}": value for name, value in module.state_dict().items()}
    for name, value in block.named_parameters():
        parts = [stored.pop(source) for source in stored_names(f".{name}", {**SOURCES, **(names or {})})]
        value.copy_(torch.cat(parts).view(value.shape))
    assert not stored, f"{sorted(stored)} were not taken"


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
