"""What an image of some size becomes: pixels that keep its shape, and tokens row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

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


def laid_out(tokens: Int32Array, sides: Iterable[tuple[int, int]], marks: tuple[int, int, int]) -> Int32Array:
    """Put marks where an image's rows end: a copy of int32 ``[n]``.

    ``sides`` are the rows and columns of each image, of which as many tokens stand there as it has vision
    rows and marks, all alike. ``marks`` are that token, the one behind each row, and the one behind the last.
    """
    image_token, row_end, image_end = marks
    found = tokens.copy()
    (places,) = np.nonzero(tokens == image_token)
    start = 0
    for rows, columns in sides:
        own = places[start : start + rows * (columns + 1)].reshape(rows, columns + 1)
        found[own[:, -1]] = row_end
        found[own[-1, -1]] = image_end
        start += own.size
    return found
