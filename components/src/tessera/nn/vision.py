"""The ends of a vision tower: pixels to its first rows, and its rows to fewer and wider ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from tessera.nn.forms.plain import PLAIN, Form, Residual
from tessera.nn.layer import SOURCES, Block, LayerNorm, Linear, Mlp, Stack, Tower
from tessera.nn.spec import CHANNELS, LayerSpec
from tessera.nn.table import Table


class PatchEmbedding(Block):
    """A product for each patch, added to a stream that begins with the patches' positions.

    A patch's features are its channels, one after another, each of its pixels row by row, in
    all of its frames: the layout of a convolution's weight.
    """

    def __init__(self, hidden: int, patch: int, *, bias: bool, frames: int = 1) -> None:
        """``patch`` is the edge of a patch in pixels, of which the weight has so many ``frames``."""
        super().__init__()
        self.patch = patch
        self._area = frames * patch**2
        self.projection = Linear(CHANNELS * self._area, hidden, bias=bias)
        self.mean: torch.Tensor
        self.std: torch.Tensor

    def fold_frames(self, frames: int) -> None:
        """For patches of one frame, where the weight is for ``frames`` alike: add up what each frame meets.

        Call it when the weight is in place, before ``place_constants``.
        """
        weight = self.projection.weight
        self._area //= frames
        folded = weight.float().view(len(weight), -1, frames, self._area).sum(2).flatten(1)
        self.projection.weight = torch.nn.Parameter(folded.to(weight.dtype), requires_grad=False)

    def place_constants(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        """Lay each channel's mean and deviation out along the features of a patch."""
        for name, values in (("mean", mean), ("std", std)):
            constants = torch.tensor(values, dtype=torch.float32, device=device)
            self.register_buffer(name, constants.repeat_interleave(self._area), persistent=False)

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> Residual:
        """Patches ``[patches, features]``, or tiles ``[tiles, channels, size, size]`` of them, row by row.

        uint8 pixels are scaled to 0 to 1 and normalised; floating ones are taken as they are. ``positions``
        ``[patches, hidden]`` may be overwritten.
        """
        stream = Residual(positions)
        self.projection.add_to(stream, self.form.patches(pixels, self))
        return stream

    def cut(self, tiles: torch.Tensor) -> torch.Tensor:
        """``[tiles, channels, size, size]`` to ``[patches, features]``."""
        n, channels, size, _ = tiles.shape
        grid, patch = size // self.patch, self.patch
        # rearranged as bytes, a quarter of the traffic that float32 would cost
        patches = tiles.reshape(n, channels, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(n * grid * grid, -1)


class TileEncoder(nn.Module):
    """Patches of tiles of one size with learned positions, pre-norm layers, and a final norm if there is one.

    Tiles are ``grid`` by ``grid`` patches of ``patch`` pixels.
    """

    def __init__(
        self,
        layer: LayerSpec,
        layers: int,
        *,
        patch: int,
        grid: int,
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        self.patches = PatchEmbedding(layer.hidden, patch, bias=True)
        self.positions = Table(grid**2, layer.hidden)
        self.layers = Stack(layer, layers)
        self.post_layernorm = LayerNorm(layer.hidden, eps=layer.eps) if final_norm else None
        self.form: Form = PLAIN

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        """Run in ``form``, with each channel's mean and deviation; call it when the weights are in place."""
        self.patches.place_constants(mean, std, device)
        self.form = form
        self.layers.prepare(form, start=self.patches, final=self.post_layernorm)

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


class VisionTower(Tower):
    """Base of vision towers; implements ``tessera.models.base.VisionModule``.

    ``sources`` says what its modules are called in weight files, as ``checkpoint.loading.fill`` has it.
    """

    sources: ClassVar[Mapping[str, tuple[str, ...]]] = SOURCES

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        """Run in ``form``; call it when the weights are in place.

        Pixels are normalised by each channel's mean and deviation.
        """
        raise NotImplementedError


class AttentionPool(nn.Module):
    """A learned query that attends to all rows of an image, then an MLP behind a norm: SigLIP's head."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self._heads = spec.heads
        self.probe = nn.Parameter(torch.empty(1, spec.hidden))
        self.in_proj = Linear(spec.hidden, 3 * spec.hidden, bias=True)
        self.out_proj = Linear(spec.hidden, spec.hidden, bias=True)
        self.norm = LayerNorm(spec.hidden, eps=spec.eps)
        self.mlp = Mlp(spec)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[n, rows, hidden]`` to ``[n, hidden]``; ``mask`` bool ``[n, rows]`` is true for what counts."""
        images, hidden = len(rows), rows.shape[2]
        weight, bias = self.in_proj.weight, self.in_proj.bias
        assert bias is not None
        query = linear(self.probe, weight[:hidden], bias[:hidden]).expand(images, 1, hidden)
        key, value = linear(rows, weight[hidden:], bias[hidden:]).chunk(2, dim=2)
        query, key, value = (
            each.reshape(images, -1, self._heads, hidden // self._heads).transpose(1, 2)
            for each in (query, key, value)
        )
        allowed = None if mask is None else mask[:, None, None, :]
        attended = scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        pooled = self.out_proj(attended.transpose(1, 2).reshape(images, hidden))
        stream = Residual(pooled.clone())
        self.mlp(self.norm(stream), stream)
        return stream.settled()


def pixel_shuffle(features: torch.Tensor, factor: int, version: Literal["v1", "v2"]) -> torch.Tensor:
    """Join ``factor`` by ``factor`` patches: ``[n, g * g, c]`` to ``[n, (g / factor)**2, factor**2 * c]``.

    A joined row holds its patches row by row. Version 2 keeps the rows in reading order, version 1 lists
    them column by column.
    """
    n, patches, channels = features.shape
    edge = round(patches**0.5) // factor
    blocks = features.reshape(n, edge, factor, edge, factor, channels)
    order = (0, 1, 3, 2, 4, 5) if version == "v2" else (0, 3, 1, 2, 4, 5)
    return blocks.permute(order).reshape(n, edge * edge, factor * factor * channels)


class Merger(nn.Module):
    """A norm, two products with GELU between them; each ``join`` consecutive rows become one.

    ``norm_joined`` puts the norm over the joined rows instead of over each.
    """

    def __init__(
        self,
        *,
        width: int,
        join: int,
        inner: int,
        out: int,
        eps: float,
        norm_joined: bool = False,
    ) -> None:
        super().__init__()
        self._width, self._join, self._norm_joined = width, join, norm_joined
        self.norm = LayerNorm(width * join if norm_joined else width, eps=eps)
        self.linear_1 = Linear(width * join, inner, bias=True)
        self.linear_2 = Linear(inner, out, bias=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n * join, width]`` to ``[n, out]``."""
        joined = rows.reshape(-1, self._join * self._width)
        normed = self.norm(Residual(joined if self._norm_joined else rows)).view_as(joined)
        merged: torch.Tensor = self.linear_2(gelu(self.linear_1(normed)))
        return merged
