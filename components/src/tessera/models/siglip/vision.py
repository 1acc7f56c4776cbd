"""SigLIP's vision tower: tiles in, vectors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.models.two_towers.config import VisionConfig
from tessera.nn.forms.choice import form_for
from tessera.nn.layer import Stack, use
from tessera.nn.vision import AttentionPool, TileEncoder, VisionVectors


class SiglipVision(VisionVectors):
    """Implements ``tessera.models.base.VisionModule``: ``[tiles, hidden]``."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.encoder = TileEncoder(
            config.layer,
            config.layers,
            channels=config.channels,
            patch=config.patch_size,
            grid=config.grid,
        )
        self.head = AttentionPool(config.layer)

    @property
    def stack(self) -> Stack:
        return self.encoder.layers

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> SiglipVision:
        self.form = form_for(device, self.encoder.positions.weight.dtype)
        self.encoder.prepare(mean, std, device, self.form)
        use(self.head, self.form)
        return self.eval()

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        vectors: torch.Tensor = self.head(self.encoder(pixels))
        return vectors
