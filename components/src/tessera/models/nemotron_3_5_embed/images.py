"""What an image of some size becomes: pixels that keep its shape, and tokens row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.image_plan import ImagePlan
from tessera.models.base import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``longest`` bounds both sides of an image in pixels; they become multiples of ``edge``."""

    edge: int
    longest: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, by the arithmetic of ``get_resize_output_image_size``.

        A side that would vanish keeps one pixel before it is rounded up, where the reference fails.
        """
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = (max(1, math.floor(side / ratio)) for side in (height, width))
        wide, high = (-(-side // self.edge) * self.edge for side in (width, height))
        return wide, high

    @property
    def most_sides(self) -> int:
        """The most rows along each side of an image."""
        return -(-self.longest // self.edge)


def laid_out(
    tokens: Int32Array, images: Sequence[ImagePlan], merge: int, marks: tuple[int, int, int]
) -> Int32Array:
    """Put marks where an image's rows end: a copy of int32 ``[n]``.

    Of each image as many tokens stand there as it has vision rows and marks, all alike. ``marks`` are that
    token, the one behind each row, and the one behind the last.
    """
    image_token, row_end, image_end = marks
    found = tokens.copy()
    (places,) = np.nonzero(tokens == image_token)
    start = 0
    for image in images:
        rows, columns = sides(image, merge)
        own = places[start : start + rows * (columns + 1)].reshape(rows, columns + 1)
        found[own[:, -1]] = row_end
        found[own[-1, -1]] = image_end
        start += own.size
    return found


def with_marks(image: ImagePlan, merge: int) -> ImagePlan:
    """An image that counts the marks among its rows as rows."""
    rows, columns = sides(image, merge)
    return ImagePlan(units=image.units, rows=rows * (columns + 1), grid=image.grid)


def sides(image: ImagePlan, merge: int) -> tuple[int, int]:
    """How many rows and columns of vision rows an image has."""
    assert image.grid is not None, "an image without a grid"
    _, high, wide = image.grid
    return high // merge, wide // merge
