"""From the encoder's patch features to rows of the backbone's width."""

from __future__ import annotations

import torch
from torch import nn

from tessera.models.llama_nemotron_vl.config import ProjectorConfig


def pixel_shuffle(features: torch.Tensor, config: ProjectorConfig) -> torch.Tensor:
    """Join ``factor`` by ``factor`` patches: ``[n, g * g, c]`` to ``[n, (g / factor)**2, factor**2 * c]``.

    A joined row holds its patches row by row. Version 2 keeps the rows in reading order, version 1 lists
    them column by column.
    """
    n, patches, channels = features.shape
    factor = config.factor
    edge = round(patches**0.5) // factor
    blocks = features.reshape(n, edge, factor, edge, factor, channels)
    order = (0, 1, 3, 2, 4, 5) if config.version == "v2" else (0, 3, 1, 2, 4, 5)
    return blocks.permute(order).reshape(n, edge * edge, factor * factor * channels)


class Projector(nn.Sequential):
    """LayerNorm, linear, exact GELU, linear; the children's numbers are the tensor names' numbers."""

    def __init__(self, config: ProjectorConfig, *, vision_hidden: int, text_hidden: int) -> None:
        features = vision_hidden * config.factor**2
        super().__init__(
            nn.LayerNorm(features, eps=config.eps),
            nn.Linear(features, text_hidden),
            nn.GELU(),
            nn.Linear(text_hidden, text_hidden),
        )
        self._config = config

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """``[n, patches, vision_hidden]`` to ``[n, tokens_per_tile, text_hidden]``."""
        hidden = pixel_shuffle(features, self._config)
        for stage in self:
            hidden = stage(hidden)
        return hidden
