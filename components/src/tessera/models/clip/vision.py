"""CLIP's vision tower: tiles in, vectors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.two_towers.config import VisionConfig
from tessera.nn.forms.plain import Form, Residual, tensor
from tessera.nn.layer import LayerNorm, Linear, Stack, use
from tessera.nn.table import Table
from tessera.nn.vision import PatchEmbedding, VisionTower


class ClipVision(VisionTower):
    """Makes ``[tiles, width]``: the projected class tokens."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        layer = config.layer
        self.class_token = nn.Parameter(torch.empty(layer.hidden))
        self.patches = PatchEmbedding(layer.hidden, config.patch_size, bias=False)
        self.embed_positions = Table(config.grid**2 + 1, layer.hidden)
        self.pre_norm = LayerNorm(layer.hidden, eps=layer.eps)
        self.layers = Stack(layer, config.layers)
        self.norm = LayerNorm(layer.hidden, eps=layer.eps)
        self.projection = Linear(layer.hidden, config.width, bias=False)

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        self.form = form
        self.patches.place_constants(mean, std, device)
        for block in (self.patches, self.pre_norm, self.norm, self.projection):
            use(block, form)
        self.layers.prepare(form)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        table = self.embed_positions.weight
        rows, hidden = table.shape
        tiles = len(pixels)
        patches = self.patches(pixels, table[1:].repeat(tiles, 1)).settled().view(tiles, rows - 1, hidden)
        first = (self.class_token + table[0]).expand(tiles, 1, hidden)
        embedded = Residual(torch.cat((first, patches), dim=1).view(tiles * rows, hidden))
        stream = Residual(tensor(self.pre_norm(embedded)))
        self.layers(stream, self.form.equal(rows), None)
        last = self.layers.output(stream, len(self.layers) - 1)
        pooled = Residual(last.view(tiles, rows, hidden)[:, 0].contiguous())
        vectors: torch.Tensor = self.projection(self.norm(pooled))
        return vectors
