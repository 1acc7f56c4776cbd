"""From the bytes of an image file to an upright RGB image, with Pillow.

What an image is, before a family resizes or cuts it:

- the first frame of an animation;
- turned upright by its EXIF orientation, as a browser shows it;
- transparency composited on white;
- 16-bit samples reduced to their high byte, for grey as for colour;
- CMYK, YCbCr, palette, grey and bilevel converted to RGB by Pillow, colour profiles ignored.

Float samples and integers beyond 16 bits have no agreed white, so they are refused.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from tessera.errors import InvalidInput, UnsupportedMedia
from tessera.imaging import image_errors, open_image, orientation

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, *, param: str) -> Image.Image:
    """The upright RGB image in ``data``; thread-safe.

    Raises ``UnsupportedMedia`` for bytes that are no image of a served format or have an unsupported
    pixel format, ``InvalidInput`` for an image that does not decode, ``PayloadTooLarge`` for one with more
    pixels than any setting allows; all name ``param``.
    """
    with image_errors(param), open_image(data, param=param) as image:
        # Before loading: what a file says about itself behind its pixels does not count.
        turn, size = orientation(image), image.size
        image.load()
        if image.size != size:
            raise InvalidInput(f"{param} is a damaged image: its size is ambiguous", param=param)
        return _to_rgb(_upright(image, turn), param=param)


def _upright(image: Image.Image, turn: int) -> Image.Image:
    transpose = _UPRIGHT.get(turn)
    if transpose is None:
        return image
    upright = image.transpose(transpose)
    upright.info = dict(image.info)
    return upright


def _to_rgb(image: Image.Image, *, param: str) -> Image.Image:
    if image.mode == "F" or image.mode == "I" or image.mode.startswith("I;16"):
        return _from_wide(image, param=param)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        page = Image.new("RGB", layer.size, (255, 255, 255))
        page.paste(layer, mask=layer.getchannel("A"))
        return page
    # a copy even when it is RGB already: the file that backs ``image`` is about to be closed
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _from_wide(image: Image.Image, *, param: str) -> Image.Image:
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
