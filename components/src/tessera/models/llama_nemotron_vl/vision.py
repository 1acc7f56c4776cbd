"""The SigLIP encoder and the projector: tiles in, rows of the backbone's width out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.llama_nemotron_vl.config import ImageConfig, ModelConfig, VisionConfig
from tessera.nn.forms.choice import form_for, fp8
from tessera.nn.forms.plain import PLAIN, Form
from tessera.nn.layer import LayerNorm, Stack
from tessera.nn.table import Table
from tessera.nn.vision import Merger, PatchEmbedding, pixel_shuffle


class Encoder(nn.Module):
    """The layers that the selected feature needs, and the final norm if it is the last hidden state."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patches = PatchEmbedding(
            channels=config.channels,
            area=config.patch_size**2,
            hidden=config.hidden,
            bias=True,
            patch=config.patch_size,
        )
        self.positions = Table(config.grid**2, config.hidden)
        self.layers = Stack(config.layer, config.layers_used)
        self.post_layernorm = LayerNorm(config.hidden, eps=config.eps) if config.final_norm else None
        self.form: Form = PLAIN

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """``[n, channels, size, size]`` to ``[n, patches, hidden]``."""
        positions = self.positions.weight
        stream = self.patches(tiles, positions.repeat(tiles.shape[0], 1))
        self.layers(stream, self.form.equal(len(positions)), None)
        if self.post_layernorm is None:
            hidden: torch.Tensor = self.layers.output(stream, len(self.layers) - 1)
        else:
            hidden = self.post_layernorm(stream)
        return hidden.view(-1, *positions.shape)


class VisionTower(nn.Module):
    """Implements ``tessera.models.base.VisionModule``; tiles see nothing of one another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config.projector
        self.vision = Encoder(config.vision)
        features, hidden = config.vision.hidden * config.projector.factor**2, config.text.layer.hidden
        self.projector = Merger(width=features, join=1, inner=hidden, out=hidden, eps=config.projector.eps)

    def prepare(self, image: ImageConfig, device: torch.device, form: Form | None = None) -> VisionTower:
        """Choose the form of the operations; call it once the weights are in place."""
        encoder = self.vision
        encoder.patches.place_constants(image.mean, image.std, device)
        encoder.form = form_for(device, encoder.positions.weight.dtype) if form is None else form
        encoder.layers.prepare(encoder.form, start=encoder.patches, final=encoder.post_layernorm)
        return self.eval()

    def quantise(self, *, keep: int) -> None:
        """Hold the encoder's products in FP8, but for ``keep`` layers at each end and the projector."""
        self.vision.layers.quantise(fp8(), keep=keep)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        return self.rows(pixels).flatten(0, 1)

    def rows(self, tiles: torch.Tensor) -> torch.Tensor:
        """``[n, channels, size, size]``, uint8 or normalised, to ``[n, tokens_per_tile, hidden]``."""
        joined = pixel_shuffle(self.vision(tiles), self._config.factor, self._config.version)
        rows: torch.Tensor = self.projector(joined.flatten(0, 1))
        return rows.view(*joined.shape[:2], rows.shape[1])
