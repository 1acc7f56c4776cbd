"""From an image file to uint8 patches of a grid that keeps its aspect ratio."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from PIL import Image

from tessera.imaging import Picture
from tessera.models.base import Empty, UInt8Array

_EPSILON: Final = 1e-5
_LARGEST_SCALE: Final = 100.0


@lru_cache(4096)
def grid_of(width: int, height: int, *, patch: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches: as many as ``most`` allows for an image scaled by one factor.

    Sides are rounded up to whole patches. The factor is found by halving, as the reference's
    ``get_image_size_for_max_num_patches`` does, whose order of operations decides near-ties.
    """

    def count(scale: float, size: int) -> int:
        return max(1, math.ceil(size * scale / patch))

    low, high = _EPSILON / 10, _LARGEST_SCALE
    while high - low >= _EPSILON:
        scale = (low + high) / 2
        if count(scale, height) * count(scale, width) <= most:
            low = scale
        else:
            high = scale
    return count(low, height), count(low, width)


def cut(
    picture: Picture,
    grid: tuple[int, int],
    *,
    patch: int,
    most: int,
    resample: Image.Resampling,
    empty: Empty = np.empty,
) -> UInt8Array:
    """Resize a picture to ``grid``; uint8 ``[1, most, 3, patch, patch]``, row by row, with zeros behind.

    Raises as ``imaging.decode`` does.
    """
    rows, columns = grid
    patches: UInt8Array = empty((1, most, 3, patch, patch), np.uint8)
    patches[0, rows * columns :] = 0
    blocks = patches[0, : rows * columns].reshape(rows, columns, 3, patch, patch)
    picture.write(blocks.transpose(2, 0, 3, 1, 4), (columns * patch, rows * patch), resample=resample)
    return patches
