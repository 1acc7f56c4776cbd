"""Pixels to the first rows of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.nn.block import Block
from tessera.nn.forms.plain import Residual
from tessera.nn.linear import Linear


class PatchEmbedding(Block):
    """A product for each patch, added to a stream that begins with the patches' positions.

    A patch's features are its channels, one after another, each of ``area`` numbers (its pixels row by row,
    in all of its frames): the layout of a convolution's weight.
    """

    def __init__(self, *, channels: int, area: int, hidden: int, bias: bool, patch: int = 0) -> None:
        """``patch`` is the edge of a patch in pixels, for pixels that are whole tiles."""
        super().__init__()
        self.patch = patch
        self._area = area
        self.projection = Linear(channels * area, hidden, bias=bias)
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
