"""Groups inputs into calls of engines, and bounds how much of them is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from tessera.local.content import ImageURL, Part, nbytes_of

T = TypeVar("T")
Size = tuple[int, int]
"""The weight and the bytes of inputs: what they take of an engine's time and of memory."""

# Of one call: 64 short texts, or four pictures, whose calls are to come back while others begin.
_WEIGHT: Final = 64
_PICTURE: Final = 16
# A text of so many weighs 1; a longer one more, or texts of 1,024 tokens would fill an engine's queue several
# times: made into tokens again and again until there was room, they came at 28 % of an H200's rate.
_CHARACTERS: Final = 256
_BYTES: Final = 16 << 20

IN_FLIGHT: Final[Size] = (4096, 512 << 20)
"""Under way for each engine: two batches of short texts, and what waits for them to be tokenised; or 256
pictures, twice as many as keep an H200 busy. The bytes are those of all engines together."""


def size_of(parts: tuple[Part | ImageURL, ...]) -> Size:
    """Return the size of one input."""
    nbytes = nbytes_of(parts)
    pictures = sum([not isinstance(part, str) for part in parts])
    return _PICTURE * pictures or max(1, nbytes // _CHARACTERS), nbytes


def take(rows: Iterator[T], size: Callable[[T], Size]) -> tuple[list[T], Size]:
    """Return the next rows for one call, and the size of all of them; none at the end."""
    taken: list[T] = []
    weight = nbytes = 0
    for row in rows:
        taken.append(row)
        own = size(row)
        weight += own[0]
        nbytes += own[1]
        if weight >= _WEIGHT or nbytes >= _BYTES or len(taken) >= _WEIGHT:
            break
    return taken, (weight, nbytes)
