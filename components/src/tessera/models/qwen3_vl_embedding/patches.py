"""From an image file to uint8 patches, and the patches' places.

Patches of an image stand in blocks of those that are merged into one row, blocks row by row, patches row by
row within a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from tessera.errors import InvalidInput
from tessera.image_plan import ImagePlan
from tessera.imaging import Picture
from tessera.models.base import Empty, Int32Array, UInt8Array


def cut(
    picture: Picture,
    size: tuple[int, int],
    *,
    patch: int,
    merge: int,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
    empty: Empty = np.empty,
) -> UInt8Array:
    """Resize a picture to ``size`` (width, height); uint8 ``[units, 3, patch, patch]``.

    Raises as ``imaging.decode`` does.
    """
    high, wide = size[1] // (patch * merge), size[0] // (patch * merge)
    patches: UInt8Array = empty((high * wide * merge**2, 3, patch, patch), np.uint8)
    blocks = patches.reshape(high, wide, merge, merge, 3, patch, patch)
    picture.write(blocks.transpose(4, 0, 2, 5, 1, 3, 6), size, resample=resample)
    return patches


def places(image: ImagePlan, *, merge: int) -> Int32Array:
    """int32 ``[4, units]``: row, column, and the image's height and width, all in patches."""
    _, height, width = grid_of(image)
    rows, columns = np.indices((height, width), dtype=np.int32)
    found = np.empty((4, height * width), np.int32)
    for values, into in zip((rows, columns), found, strict=False):
        blocks = values.reshape(height // merge, merge, width // merge, merge).transpose(0, 2, 1, 3)
        into[:] = blocks.reshape(-1)
    found[2], found[3] = height, width
    return found


def positions(
    placeholders: Int32Array, images: Sequence[ImagePlan], tokens: int, *, merge: int
) -> Int32Array:
    """int32 ``[3, tokens]``: time, height and width of each token, for interleaved mRoPE.

    A text's tokens count on, all three alike. An image's rows share the time at which it begins, and have
    their places on the merged grid added to it as height and width; what follows begins behind the longer
    side. ``placeholders`` are the places of the rows in the prompt, ascending.
    """
    found = np.empty((3, tokens), np.int32)
    position = stop = behind = 0
    for image in images:
        _, high, wide = (side // merge for side in grid_of(image))
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


def check_grid(image: ImagePlan, *, merge: int, param: str) -> None:
    """Raise ``InvalidInput`` naming ``param`` for an image without a grid that makes its vision rows."""
    if image.grid is None:
        raise InvalidInput(f"{param} has vision rows without their grid, which positions need", param=param)
    frames, high, wide = image.grid
    fits = frames == 1 and high > 0 and wide > 0 and high % merge == 0 and wide % merge == 0
    if not fits or image.rows != high * wide // merge**2:
        raise InvalidInput(
            f"{param}: a grid of {list(image.grid)} patches does not make {image.rows} vision rows",
            param=param,
        )


def grid_of(image: ImagePlan) -> tuple[int, int, int]:
    """The grid of an image of which it is known that it has one."""
    assert image.grid is not None, "an image without a grid"
    return image.grid
