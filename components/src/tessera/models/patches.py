"""Images that keep their shape: cut into patches, of which neighbouring ones become one vision row.

Patches of an image stand in blocks of those that are merged into one row, blocks row by row, patches row by
row within a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tessera.errors import InvalidInput
from tessera.image_plan import ImagePlan
from tessera.imaging import Picture
from tessera.models.base import Empty, Int32Array, Pixels, UInt8Array, VisionSpec
from tessera.models.tower import TowerModel
from tessera.nn.spec import CHANNELS, LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedVision:
    """A vision transformer over patches of ``patch_size`` pixels along each edge.

    ``merge`` by ``merge`` neighbouring patches become one row. ``theta`` is that of their rotary positions.
    """

    layers: int
    layer: LayerSpec
    patch_size: int
    merge: int
    theta: float = 10_000.0

    @property
    def edge(self) -> int:
        """Pixels along each edge of the patches that become one row."""
        return self.patch_size * self.merge

    @property
    def pixel_elements(self) -> int:
        """Elements alive for each patch when its pixels are embedded, beside the weights."""
        # The pixels as bytes, in float32 before and after normalising, whatever the module's type.
        return 2 * self.layer.hidden + 3 * CHANNELS * self.patch_size**2

    def spec(self, row_width: int, width: int, height: int) -> VisionSpec:
        """The vision stage with rows so wide, whose largest image has this size."""
        return VisionSpec(
            row_width=row_width,
            unit_shape=(CHANNELS, self.patch_size, self.patch_size),
            largest=self.plan(width, height),
        )

    def plan(self, width: int, height: int) -> ImagePlan:
        """What an image of this size becomes, whose sides are multiples of ``edge``."""
        high, wide = height // self.patch_size, width // self.patch_size
        return ImagePlan(units=high * wide, rows=high * wide // self.merge**2, grid=(1, high, wide))

    def check(self, image: ImagePlan, param: str) -> None:
        """Raise ``InvalidInput`` naming ``param`` for an image without a grid that makes its vision rows."""
        if image.grid is None:
            raise InvalidInput(
                f"{param} has vision rows without their grid, which positions need", param=param
            )
        frames, high, wide = image.grid
        fits = frames == 1 and high > 0 and wide > 0 and high % self.merge == 0 and wide % self.merge == 0
        if not fits or image.rows != high * wide // self.merge**2:
            raise InvalidInput(
                f"{param}: a grid of {list(image.grid)} patches does not make {image.rows} vision rows",
                param=param,
            )

    def sides(self, image: ImagePlan) -> tuple[int, int]:
        """How many rows and columns of vision rows an image has."""
        assert image.grid is not None, "an image without a grid"
        _, high, wide = image.grid
        return high // self.merge, wide // self.merge

    def places(self, image: ImagePlan) -> Int32Array:
        """int32 ``[4, units]``: row, column, and the image's height and width, all in patches."""
        merge, (high, wide) = self.merge, self.sides(image)
        rows, columns = np.indices((high * merge, wide * merge), dtype=np.int32)
        found = np.empty((4, rows.size), np.int32)
        for values, into in zip((rows, columns), found, strict=False):
            into[:] = values.reshape(high, merge, wide, merge).transpose(0, 2, 1, 3).reshape(-1)
        found[2], found[3] = rows.shape
        return found

    def positions(self, placeholders: Int32Array, images: Sequence[ImagePlan], tokens: int) -> Int32Array:
        """int32 ``[3, tokens]``: time, height and width of each token, for interleaved mRoPE.

        A text's tokens count on, all three alike. An image's rows share the time at which it begins, and have
        their places on the merged grid added to it as height and width; what follows begins behind the longer
        side. ``placeholders`` are the places of the rows in the prompt, ascending.
        """
        found = np.empty((3, tokens), np.int32)
        position = stop = behind = 0
        for image in images:
            high, wide = self.sides(image)
            start = int(placeholders[behind])
            found[:, stop:start] = np.arange(position, position + start - stop, dtype=np.int32)
            position += start - stop
            stop = start + high * wide
            rows, columns = np.indices((high, wide), dtype=np.int32).reshape(2, -1)
            found[0, start:stop] = position
            found[1, start:stop] = position + rows
            found[2, start:stop] = position + columns
            position += max(high, wide)
            behind += image.rows
        found[:, stop:] = np.arange(position, position + tokens - stop, dtype=np.int32)
        return found

    def cut(
        self, picture: Picture, size: tuple[int, int], resample: Image.Resampling, empty: Empty
    ) -> UInt8Array:
        """Resize a picture to ``size`` (width, height); uint8 ``[units, 3, patch, patch]``.

        Raises as ``imaging.decode`` does.
        """
        patch, merge = self.patch_size, self.merge
        high, wide = size[1] // self.edge, size[0] // self.edge
        patches: UInt8Array = empty((high * wide * merge**2, 3, patch, patch), np.uint8)
        blocks = patches.reshape(high, wide, merge, merge, 3, patch, patch)
        picture.write(blocks.transpose(4, 0, 2, 5, 1, 3, 6), size, resample=resample)
        return patches


class PatchedImages(TowerModel):
    """Base of families whose images keep their shape; ``patched`` is their vision tower."""

    patched: PatchedVision
    resample = Image.Resampling.BICUBIC

    def resized(self, width: int, height: int, param: str) -> tuple[int, int]:
        """Width and height after resizing; raises ``InvalidInput`` for what the family does not take."""
        raise NotImplementedError

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return self.patched.plan(*self.resized(width, height, param))

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """As ``PatchedVision.places``."""
        return self.patched.places(image)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        size = self.resized(*picture.size, picture.param)
        patches = self.patched.cut(picture, size, self.resample, empty)
        return Pixels(values=patches, plan=self.patched.plan(*size))
