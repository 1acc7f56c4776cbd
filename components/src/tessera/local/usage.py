"""Counts what engines have done."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start: seconds of engines at work, on all cards together, and lookups of images.

    Zeros where that is not known.
    """

    engine_seconds: float = 0.0
    images: int = 0
    cached_images: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            engine_seconds=self.engine_seconds + other.engine_seconds,
            images=self.images + other.images,
            cached_images=self.cached_images + other.cached_images,
        )
