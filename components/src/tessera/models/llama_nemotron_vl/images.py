"""Which grid of tiles an image is cut into, and the cutting.

The rule scores every allowed grid by the area it keeps, counted up to 60 % of the image's own, times
how well its shape fits. It has to pick the same grid as the reference for every size, and near-ties are
decided by rounding, so the arithmetic below keeps the reference's order of operations in float64.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tessera.imaging import Picture
from tessera.models.base import Empty, UInt8Array
from tessera.models.llama_nemotron_vl.config import ImageConfig

Grid = tuple[int, int]
"""(columns, rows)"""


@lru_cache(maxsize=64)
def candidates(smallest: int, largest: int) -> tuple[Grid, ...]:
    """Grids of ``smallest`` to ``largest`` tiles, in the order in which ties are decided.

    The reference collects them in a set and sorts by area only, so grids of equal area stay in CPython's
    iteration order. That order is a function of the tuples' hashes and of the order of insertion, both
    fixed since Python 3.8; building the same set in the same way reproduces it.
    """
    found = {
        (columns, rows)
        for tiles in range(smallest, largest + 1)
        for columns in range(1, tiles + 1)
        for rows in range(1, tiles + 1)
        if smallest <= columns * rows <= largest
    }
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))


def choose_grid(width: int, height: int, image: ImageConfig) -> Grid:
    """The grid for an upright image of ``width`` by ``height`` pixels, both at least 1."""
    if not image.dynamic:
        return (1, 1)
    area = width * height
    aspect = width / height
    best = float("-inf")
    chosen = (1, 1)
    for columns, rows in candidates(image.min_tiles, image.max_tiles):
        ratio = columns / rows
        covered = (columns * rows * image.tile_size * image.tile_size) / area
        score = min(covered, 0.6) * min(ratio / aspect, aspect / ratio)
        if score > best:
            best = score
            chosen = (columns, rows)
    return chosen


def count_tiles(width: int, height: int, image: ImageConfig) -> int:
    """Tiles of the image, the thumbnail included."""
    columns, rows = choose_grid(width, height, image)
    return columns * rows + has_thumbnail((columns, rows), image)


def has_thumbnail(grid: Grid, image: ImageConfig) -> bool:
    """Whether an image cut into this grid becomes one more tile, of the whole of it."""
    return image.dynamic and image.thumbnail and grid != (1, 1)


def cut(picture: Picture, config: ImageConfig, empty: Empty = np.empty) -> UInt8Array:
    """Cut a picture into uint8 ``[tiles, 3, size, size]``, row by row, thumbnail last; thread-safe.

    Raises as ``imaging.decode`` does.
    """
    size = config.tile_size
    columns, rows = grid = choose_grid(*picture.size, config)
    count = columns * rows
    thumbnail = has_thumbnail(grid, config)
    tiles: UInt8Array = empty((count + thumbnail, 3, size, size), np.uint8)
    by_row = tiles[:count].reshape(rows, columns, 3, size, size).transpose(2, 0, 3, 1, 4)
    if thumbnail:
        # First: where Pillow resizes, what it decoded for that is there for the tiles as well.
        picture.write(tiles[count], (size, size))
    picture.write(by_row, (columns * size, rows * size))
    return tiles
