"""The SigLIP encoder and the projector: tiles in, rows of the backbone's width out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.llama_nemotron_vl.config import ImageConfig, ModelConfig
from tessera.nn.forms.choice import form_for
from tessera.nn.forms.plain import Form
from tessera.nn.vision import Merger, TileEncoder, pixel_shuffle


class VisionTower(nn.Module):
    """Implements ``tessera.models.base.VisionModule``; tiles see nothing of one another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config.projector
        vision = config.vision
        self.vision = TileEncoder(
            vision.layer,
            vision.layers_used,
            channels=vision.channels,
            patch=vision.patch_size,
            grid=vision.grid,
            final_norm=vision.final_norm,
        )
        features, hidden = config.vision.hidden * config.projector.factor**2, config.text.layer.hidden
        self.projector = Merger(width=features, join=1, inner=hidden, out=hidden, eps=config.projector.eps)

    def prepare(self, image: ImageConfig, device: torch.device, form: Form | None = None) -> VisionTower:
        """Choose the form of the operations; call it once the weights are in place."""
        chosen = form_for(device, self.vision.positions.weight.dtype) if form is None else form
        self.vision.prepare(image.mean, image.std, device, chosen)
        return self.eval()

    def quantise(self, *, keep: int) -> None:
        """Hold the encoder's products in FP8, but for ``keep`` layers at each end and the projector."""
        self.vision.layers.quantise(keep=keep)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        return self.rows(pixels).flatten(0, 1)

    def rows(self, tiles: torch.Tensor) -> torch.Tensor:
        """``[n, channels, size, size]``, uint8 or normalised, to ``[n, tokens_per_tile, hidden]``."""
        joined = pixel_shuffle(self.vision(tiles), self._config.factor, self._config.version)
        rows: torch.Tensor = self.projector(joined.flatten(0, 1))
        return rows.view(*joined.shape[:2], rows.shape[1])
