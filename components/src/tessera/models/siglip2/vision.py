"""SigLIP 2's vision tower for grids of any aspect ratio: padded patches in, vectors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.two_towers.config import VisionConfig
from tessera.nn.forms.plain import Form
from tessera.nn.layer import LayerNorm, Stack, use
from tessera.nn.sequences import Padded
from tessera.nn.spec import CHANNELS
from tessera.nn.table import Table
from tessera.nn.vision import AttentionPool, PatchEmbedding, VisionTower


class Siglip2Vision(VisionTower):
    """Makes ``[images, hidden]``.

    An image is one unit, uint8 or normalised ``[patches, channels, patch, patch]`` with padding behind.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        layer = config.layer
        self._grid = config.grid
        self.patches = PatchEmbedding(layer.hidden, config.patch_size, bias=True)
        self.embed_positions = Table(config.grid**2, layer.hidden)
        self.layers = Stack(layer, config.layers)
        self.norm = LayerNorm(layer.hidden, eps=layer.eps)
        self.head = AttentionPool(layer)

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        # Files have a patch's pixels one after another, each with its channels.
        weight = self.patches.projection.weight
        by_channel = weight.view(len(weight), -1, CHANNELS).transpose(1, 2).flatten(1).contiguous()
        self.patches.projection.weight = nn.Parameter(by_channel, requires_grad=False)
        self.patches.place_constants(mean, std, device)
        self.layers.prepare(form, start=self.patches, final=self.norm)
        use(self.head, form)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        """``positions`` int32 ``[2, images]``: rows and columns of each image's grid."""
        images, patches = pixels.shape[:2]
        table = self.embed_positions.weight
        places, mask = taps(positions, patches, self._grid)
        embedded = torch.matmul(places.to(table.dtype), table).flatten(0, 1)
        stream = self.patches(pixels.flatten(0, 1).flatten(1), embedded)
        self.layers(stream, Padded(mask), None)
        rows: torch.Tensor = self.norm(stream)
        vectors: torch.Tensor = self.head(rows.view(images, patches, -1), mask)
        return vectors


def taps(grids: torch.Tensor, patches: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of each learned position a patch has, and which patches are some.

    ``grids`` is int32 ``[2, images]``, rows and columns. The table of ``side`` by ``side`` positions is
    resized to an image's grid as ``torch.nn.functional.interpolate`` does, bilinearly with antialiasing:
    float32 ``[images, patches, side * side]``, which add up to 1, and bool ``[images, patches]``.
    """
    # A graph is recorded with grids of nothing, whose rows nobody reads.
    rows, columns = grids.clamp(min=1)[:, :, None]
    number = torch.arange(patches, device=grids.device)
    row, column = number // columns, number % columns
    down, across = _weights(row, rows, side), _weights(column, columns, side)
    places = down[:, :, :, None] * across[:, :, None, :]
    return places.flatten(2), number < rows * columns


def _weights(place: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
    """The share of each of ``side`` places in place ``[images, patches]`` of ``size``: ``[..., side]``.

    A triangle around the place's middle, as wide as a step where the grid has fewer places than the table.
    """
    step = side / size.float()
    middle = (place.float() + 0.5) * step
    at = torch.arange(side, device=place.device).float() + 0.5
    away = (at - middle[..., None]).abs() / step.clamp(min=1.0)[..., None]
    shares = (1.0 - away).clamp(min=0.0)
    # What is padding lies outside the table.
    return shares / shares.sum(-1, keepdim=True).clamp(min=1e-6)
