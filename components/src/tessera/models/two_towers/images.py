"""How an image file becomes the pixels of one tile, by ``preprocessor_config.json``; torch-free.

An image is squashed to the tile, or resized by its shorter side and cut out of the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from tessera.checkpoint.section import Section, short
from tessera.imaging import Picture
from tessera.models.base import Empty, UInt8Array

PROCESSOR_FILE: Final = "preprocessor_config.json"
_NEWER_FILE: Final = "processor_config.json"

Channels = tuple[float, float, float]

CLIP_MEAN: Final[Channels] = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final[Channels] = (0.26862954, 0.26130258, 0.27577711)
HALF: Final[Channels] = (0.5, 0.5, 0.5)

_USUAL_SIZE: Final = 224
_RESAMPLES: Final = {2: Image.Resampling.BILINEAR, 3: Image.Resampling.BICUBIC}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """How pixels are resized, and how their bytes become numbers: mean and deviation of each channel."""

    resample: Image.Resampling
    mean: Channels
    std: Channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How an image becomes a tile of ``size`` by ``size`` pixels, of which ``kept`` are whole patches.

    ``shortest`` is what its shorter side is resized to before the tile is cut out of the middle; None: both
    sides are resized to the tile's.
    """

    size: int
    kept: int
    shortest: int | None

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, by the reference's arithmetic."""
        if self.shortest is None:
            return self.size, self.size
        if width <= height:
            return self.shortest, int(self.shortest * height / width)
        return int(self.shortest * width / height), self.shortest

    def cut(self, picture: Picture, processing: Processing, empty: Empty = np.empty) -> UInt8Array:
        """Write a picture as uint8 ``[1, 3, kept, kept]``; thread-safe. Raises as ``Picture.write``."""
        kept = self.kept
        tiles: UInt8Array = empty((1, 3, kept, kept), np.uint8)
        wide, high = self.resized(*picture.size)
        left, upper = (wide - self.size) // 2, (high - self.size) // 2
        part = None if (wide, high) == (kept, kept) else (left, upper, left + kept, upper + kept)
        picture.write(tiles[0], (wide, high), resample=processing.resample, part=part)
        return tiles


def read_processor(directory: Path) -> Section:
    """Read what the checkpoint says of its images; raises ``CheckpointError`` where it says nothing.

    Newer tools write it into ``processor_config.json``, which wins, as in the reference. A key that it lacks
    has the default of its class there. Without either file no class is named, and nothing is assumed.
    """
    newer = Section.read(directory / _NEWER_FILE, optional=True)
    if newer.has("image_processor"):
        return newer.section("image_processor")
    return Section.read(directory / PROCESSOR_FILE)


def read_processing(processor: Section, *, resample: int, mean: Channels, std: Channels) -> Processing:
    """Read what follows the choice of a size; defaults are given. Raises ``CheckpointError``."""
    if not read_flag(processor, "do_resize", True):
        raise processor.error("do_resize", "is false, which is not supported")
    chosen = processor.integer("resample", resample, at_least=0)
    if chosen not in _RESAMPLES:
        raise processor.error("resample", f"must be 2 (bilinear) or 3 (bicubic), not {chosen}")
    mean, std = read_normalisation(processor, mean=mean, std=std)
    return Processing(resample=_RESAMPLES[chosen], mean=mean, std=std)


def read_normalisation(processor: Section, *, mean: Channels, std: Channels) -> tuple[Channels, Channels]:
    """Read how bytes become numbers; defaults are given. Raises ``CheckpointError``."""
    for key in ("do_rescale", "do_normalize"):
        if not read_flag(processor, key, True):
            raise processor.error(key, "is false, which is not supported")
    if abs(processor.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
        raise processor.error("rescale_factor", "must be 1/255")
    return (
        read_channels(processor, "image_mean", mean),
        read_channels(processor, "image_std", std, positive=True),
    )


def check_same(processor: Section, key: str, expected: int, *, default: int) -> None:
    """Raise ``CheckpointError`` for a count other than ``config.json`` has; ``default`` is of the class."""
    if (found := processor.integer(key, default)) != expected:
        raise processor.error(key, f"must be {expected}, as in config.json, not {found}")


def read_flag(processor: Section, key: str, default: bool) -> bool:
    """Read a flag, which is false where it is ``null``: the reference looks at its truth."""
    return processor.flag(key, False if key in processor.values else default)


def read_tiling(processor: Section, *, size: int, patch: int, crops: bool) -> Tiling:
    """Read how images become tiles of ``size`` pixels, cut into patches of ``patch``.

    ``crops`` is what the class does where the file does not say it; its sizes are 224 pixels.

    Raises ``CheckpointError`` for tiles of another size.
    """
    kept, tile = size // patch * patch, {"height": size, "width": size}
    square = {"height": _USUAL_SIZE, "width": _USUAL_SIZE}
    resized = _size(processor, "size", {"shortest_edge": _USUAL_SIZE} if crops else square)
    if processor.values.get("use_square_size"):
        raise processor.error("use_square_size", "is true, which is not supported")
    if not read_flag(processor, "do_center_crop", crops):
        if resized != tile:
            raise processor.error("size", f"must be {tile}, as the positions are, not {resized}")
        return Tiling(size=size, kept=kept, shortest=None)
    if (cropped := _size(processor, "crop_size", square)) != tile:
        raise processor.error("crop_size", f"must be {tile}, as the positions are, not {cropped}")
    if resized == tile:
        return Tiling(size=size, kept=kept, shortest=None)
    shortest = resized.get("shortest_edge", 0)
    if shortest < size or len(resized) > 1:
        raise processor.error("size", f"must be a shortest_edge of at least {size} alone, not {resized}")
    return Tiling(size=size, kept=kept, shortest=shortest)


def _size(processor: Section, key: str, default: dict[str, int]) -> dict[str, int]:
    """Return a size by its names; a number is the shortest edge of ``size``, and both edges of a crop."""
    value = processor.values.get(key)
    if value is None:
        return default
    if type(value) is int:
        found = {"shortest_edge": value} if key == "size" and "shortest_edge" in default else None
        return found or {"height": value, "width": value}
    if not isinstance(value, dict):
        raise processor.error(key, f"must be a number or an object of numbers, not {short(value)}")
    section = processor.section(key)
    return {name: section.integer(name) for name in section.values if section.has(name)}


def read_channels(processor: Section, key: str, default: Channels, *, positive: bool = False) -> Channels:
    """Read a number for each channel; raises ``CheckpointError``."""
    values = processor.values.get(key)
    if values is None:
        return default
    least = 1e-6 if positive else 0.0
    if (
        not isinstance(values, list)
        or len(values) != 3
        or not all(type(each) in (int, float) and least <= each < 1e6 for each in values)
    ):
        raise processor.error(key, f"must be three numbers, not {short(values)}")
    return (float(values[0]), float(values[1]), float(values[2]))
