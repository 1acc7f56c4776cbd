"""From what Pillow has decoded to RGB on white, where Pillow itself loses what is transparent.

Samples of 16 bits become their high byte. A frame leaves what it does not cover of its canvas transparent,
where Pillow has the background colour (GIF) or black (WebP). The transparent colour of a PNG is a sample as
it is stored, of 2, 4 or 16 bits, which Pillow compares with samples of 8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, ImageFile

from tessera.errors import UnsupportedMedia

Box = tuple[int, int, int, int]

_WHITE: Final = (255, 255, 255)
_MAX_CHUNKS: Final = 1000
# Of sRGB, of which programs write all kinds of roundings; and those that can be meant at all.
_USUAL_GAMMA: Final = 1 / 2.2
_USUAL_APART: Final = 0.03
_LEAST_GAMMA, _MOST_GAMMA = 0.1, 10.0
_ANIMATED: Final = 0x02


@dataclass(frozen=True, slots=True, kw_only=True)
class Transparency:
    """What is transparent of an image: all outside ``box``, and the colour ``colour`` in 8 bits.

    ``gamma`` is what samples were raised to, where that is another one than sRGB's.
    """

    box: Box | None = None
    colour: int | tuple[int, int, int] | None = None
    gamma: float | None = None

    @classmethod
    def of(cls, image: Image.Image, data: bytes = b"") -> Transparency:
        """Read it from an opened file, whose bytes are ``data``; ask before ``load``."""
        if not isinstance(image, ImageFile.ImageFile) or not image.tile:
            return cls(box=_webp_frame(data) if image.format == "WEBP" else None)
        tile = image.tile[0]
        if image.format == "GIF":
            # A later one lies on those before it.
            return cls(box=None if image.tell() else tile.extents)
        if image.format == "PNG":
            colour = _png_colour(tile.args, image.info.get("transparency"))
            return cls(colour=colour, gamma=_png_gamma(image))
        return cls(box=_webp_frame(data) if image.format == "WEBP" else None)


def to_rgb(image: Image.Image, transparency: Transparency | None, *, param: str) -> Image.Image:
    """Return a decoded image as RGB on white; ``transparency`` is what was read of it before.

    Raises ``UnsupportedMedia`` for float samples and for integers beyond 16 bits, which have no agreed white.
    """
    gamma = None if transparency is None else transparency.gamma
    if image.mode == "F" or image.mode == "I" or image.mode.startswith("I;16"):
        wide = _of_wide(image, param=param)
        return wide if gamma is None else wide.point(_as_srgb(gamma) * 3)
    if transparency is not None and transparency.colour is not None:
        # A program's image stays as it is.
        image = image.copy()
        image.info["transparency"] = transparency.colour
    if image.has_transparency_data:
        layer = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        found = Image.new("RGB", layer.size, _WHITE)
        if gamma is not None:
            layer = layer.point([*_as_srgb(gamma) * 3, *range(256)])
        found.paste(layer, mask=layer.getchannel("A"))
    else:
        # No copy of what is RGB already: it is loaded, and needs the file behind it no more.
        found = image.convert("RGB") if image.mode != "RGB" else image
        if gamma is not None:
            found = found.point(_as_srgb(gamma) * 3)
    box = None if transparency is None else transparency.box
    if box is None or box == (0, 0, *image.size):
        return found
    canvas = Image.new("RGB", found.size, _WHITE)
    canvas.paste(found.crop(box), box)
    return canvas


def _of_wide(image: Image.Image, *, param: str) -> Image.Image:
    samples = np.asarray(image)
    if samples.dtype.kind == "f" or samples.min() < 0 or samples.max() > 0xFFFF:
        raise UnsupportedMedia(
            f"{param} has {image.mode} samples beyond 16 bits; convert it to 8 or 16 bits", param=param
        )
    high = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        high[samples == transparent] = 255
    return Image.fromarray(high).convert("RGB")


def _png_gamma(image: Image.Image) -> float | None:
    gamma = image.info.get("gamma")
    if "srgb" in image.info or not isinstance(gamma, float) or not _LEAST_GAMMA <= gamma <= _MOST_GAMMA:
        return None
    return None if abs(gamma - _USUAL_GAMMA) < _USUAL_APART else gamma


def _as_srgb(gamma: float) -> list[int]:
    """What samples of 8 bits, raised to ``gamma``, are as sRGB (IEC 61966-2-1)."""
    light = (np.arange(256) / 255) ** (1 / gamma)
    shown = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return [int(value) for value in np.rint(255 * shown)]


def _png_colour(rawmode: object, colour: object) -> int | tuple[int, int, int] | None:
    """The transparent colour in 8 bits, where that is another number than the one in the file."""
    if isinstance(colour, int):
        most = {"L;2": 3, "L;4": 15}.get(str(rawmode))
        return None if most is None else colour * (255 // most)
    if isinstance(colour, tuple) and str(rawmode).startswith("RGB;16"):
        # Pillow has the high bytes alone by now: what differs in low ones is the colour as well.
        red, green, blue = (int(value) >> 8 for value in colour)
        return red, green, blue
    return None


def _webp_frame(data: bytes) -> Box | None:
    """The part of its canvas that an animation's first frame covers; None for a picture that is none."""
    if data[12:16] != b"VP8X" or len(data) < 30 or not data[20] & _ANIMATED:
        return None
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 24 > len(data):
            return None
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"ANMF":
            left, top, wide, high = (
                int.from_bytes(data[at + 8 + k : at + 11 + k], "little") for k in (0, 3, 6, 9)
            )
            return 2 * left, 2 * top, 2 * left + wide + 1, 2 * top + high + 1
        at += 8 + size + size % 2
    return None
