"""SigLIP's vision tower: tiles in, vectors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.models.two_towers.config import VisionConfig
from tessera.nn.forms.plain import Form
from tessera.nn.layer import SOURCES, use
from tessera.nn.vision import AttentionPool, TileEncoder, VisionTower


class SiglipVision(VisionTower):
    """Makes ``[tiles, hidden]``."""

    # The encoder is a module of its own here alone, and has no name in files.
    sources = {
        **SOURCES,
        "encoder.patches": ("patches",),
        "encoder.positions": ("embed_positions",),
        "encoder.layers": ("layers",),
        "encoder.post_layernorm": ("norm",),
    }

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.encoder = TileEncoder(config.layer, config.layers, patch=config.patch_size, grid=config.grid)
        self.head = AttentionPool(config.layer)

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        self.encoder.prepare(mean, std, device, form)
        use(self.head, form)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        vectors: torch.Tensor = self.head(self.encoder(pixels))
        return vectors
