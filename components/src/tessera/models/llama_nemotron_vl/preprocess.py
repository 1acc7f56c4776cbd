"""From an image file to uint8 tiles: resized and cut with Pillow."""

from __future__ import annotations

import numpy as np
from PIL import Image

from tessera.models.base import UInt8Array
from tessera.models.images import decode
from tessera.models.llama_nemotron_vl.config import ImageConfig
from tessera.models.llama_nemotron_vl.tiling import choose_grid, has_thumbnail


def preprocess(data: bytes, config: ImageConfig, *, param: str) -> UInt8Array:
    """Decode and cut ``data`` into uint8 ``[tiles, 3, size, size]``, row by row, thumbnail last.

    Raises as ``decode`` does. Thread-safe.
    """
    return cut(decode(data, param=param), config)


def cut(image: Image.Image, config: ImageConfig) -> UInt8Array:
    """Cut an upright RGB image into uint8 ``[tiles, 3, size, size]``."""
    size = config.tile_size
    columns, rows = grid = choose_grid(*image.size, config)
    count = columns * rows
    thumbnail = has_thumbnail(grid, config)
    tiles = np.empty((count + thumbnail, 3, size, size), dtype=np.uint8)
    pixels = _resized(image, columns * size, rows * size)
    by_tile = pixels.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
    tiles[:count].reshape(rows, columns, 3, size, size)[...] = by_tile
    if thumbnail:
        tiles[count] = _resized(image, size, size).transpose(2, 0, 1)
    return tiles


def _resized(image: Image.Image, width: int, height: int) -> UInt8Array:
    # the widened filter support of Pillow's bicubic is the antialiasing that the reference relies on
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
