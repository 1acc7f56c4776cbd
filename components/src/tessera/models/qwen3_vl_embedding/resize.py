"""The size that an image is resized to before it is cut into patches.

The rule is the reference's, in its order of operations, since near-ties are decided by rounding: each side
becomes the nearest multiple of a merged patch's edge, by Python's rounding to even, and where the area is out
of bounds both sides are scaled by the root of the excess, then rounded towards the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tessera.errors import InvalidInput

_LARGEST_RATIO: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``edge`` is that of a merged patch in pixels; the areas bound what an image is resized to.

    ``least_side``, in edges, is what a side becomes that rounds to less: 1 in the code that is published with
    Qwen3-VL-Embedding. In that of ``transformers`` it is 0, which scales the image up.
    """

    edge: int
    min_pixels: int
    max_pixels: int
    least_side: int = 1

    def resized(self, width: int, height: int, *, param: str) -> tuple[int, int]:
        """Width and height after resizing; raises ``InvalidInput`` naming ``param`` for a narrow strip."""
        ratio = max(width, height) / min(width, height)
        if ratio > _LARGEST_RATIO:
            raise InvalidInput(
                f"{param} is {width}x{height}: one side may be at most {_LARGEST_RATIO} times the other",
                param=param,
            )
        edge = self.edge
        high, wide = (max(self.least_side, round(side / edge)) * edge for side in (height, width))
        if high * wide > self.max_pixels:
            scale = math.sqrt((height * width) / self.max_pixels)
            high = math.floor(height / scale / edge) * edge
            wide = math.floor(width / scale / edge) * edge
            return self._guarded(wide, high)
        if high * wide < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            high = math.ceil(height * scale / edge) * edge
            wide = math.ceil(width * scale / edge) * edge
        return wide, high

    def _guarded(self, wide: int, high: int) -> tuple[int, int]:
        """Give a side that a small ``max_pixels`` leaves nothing one patch, and the other what then fits."""
        longest = self.max_pixels // self.edge // self.edge * self.edge
        if not high:
            return min(wide, longest), self.edge
        if not wide:
            return self.edge, min(high, longest)
        return wide, high

    @property
    def most_rows(self) -> int:
        """Merged patches of the largest image; more than ``max_pixels`` has if ``min_pixels`` is near it."""
        edge, area = self.edge, self.min_pixels
        # A strip that is scaled up to ``min_pixels`` gains up to one patch along each side.
        sides = math.sqrt(area * _LARGEST_RATIO) + math.sqrt(area / _LARGEST_RATIO)
        grown = area + edge * sides + edge**2
        return int(max(self.max_pixels, grown)) // edge**2
