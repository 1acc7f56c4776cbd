"""From the bytes of an image file to uint8 tiles, with Pillow.

What an image is, before it is cut:

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
from tessera.models.base import UInt8Array
from tessera.models.llama_nemotron_vl.config import ImageConfig
from tessera.models.llama_nemotron_vl.tiling import choose_grid, has_thumbnail

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def preprocess(data: bytes, config: ImageConfig, *, param: str) -> UInt8Array:
    """Decode and cut ``data`` into uint8 ``[tiles, 3, size, size]``, row by row, thumbnail last.

    Raises ``UnsupportedMedia`` for bytes that are no image of a served format or have an unsupported
    pixel format, ``InvalidInput`` for an image that does not decode, ``PayloadTooLarge`` for one with more
    pixels than any setting allows; all name ``param``. Thread-safe.
    """
    return cut(decode(data, param=param), config)


def decode(data: bytes, *, param: str) -> Image.Image:
    """The upright RGB image in ``data``."""
    with image_errors(param), open_image(data, param=param) as image:
        # Before loading: what a file says about itself behind its pixels does not count.
        turn, size = orientation(image), image.size
        image.load()
        if image.size != size:
            raise InvalidInput(f"{param} is a damaged image: its size is ambiguous", param=param)
        return _to_rgb(_upright(image, turn), param=param)


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
