"""BMP files whose samples lie at unusual bits, of which Pillow loses the transparency or reads nothing.

Pillow 13 reads five, six or eight bits for a colour in usual orders. One bit of alpha beside fifteen of
colour it leaves out without a word, and four or ten bits for a colour it refuses.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

MAGIC: Final = b"BM"
# BITMAPINFOHEADER and its followers: the header's size, and where the masks are behind the file's header.
_LEAST_HEADER: Final = 40
_WITH_ALPHA: Final = 56
_MASKS: Final = 14 + 40
_BITFIELDS, _ALPHA_BITFIELDS = 3, 6
_USUAL_16: Final = ((0xF800, 0x7E0, 0x1F, 0), (0x7C00, 0x3E0, 0x1F, 0))
_WHOLE_BYTES: Final = (0, 0xFF, 0xFF00, 0xFF0000, 0xFF000000)


def open_bmp(data: bytes) -> ImageFile.ImageFile | None:
    """Return a file opened that Pillow would not show rightly; None for all others.

    Raises ``ValueError`` for masks that are none.
    """
    if len(data) < _MASKS + 16 or not data.startswith(MAGIC):
        return None
    place, header, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", data, 10)
    if header < _LEAST_HEADER or bits not in (16, 32) or compression not in (_BITFIELDS, _ALPHA_BITFIELDS):
        return None
    masks = struct.unpack_from("<4I", data, _MASKS)
    if header < _WITH_ALPHA and compression == _BITFIELDS:
        masks = (*masks[:3], 0)
    if masks in _USUAL_16 if bits == 16 else all(mask in _WHOLE_BYTES for mask in masks):
        return None
    if not all(masks[:3]) or any(mask >> bits for mask in masks):
        raise ValueError(f"colours at the bits {', '.join(map(hex, masks))} of {bits}")
    return MaskedBmp(data, place, width, height, bits, masks)


class MaskedBmp(ImageFile.ImageFile):
    """Pixels of 16 or 32 bits, with masks for red, green, blue and alpha; RGB, on white."""

    format = "BMP"

    def __init__(
        self, data: bytes, place: int, width: int, height: int, bits: int, masks: tuple[int, ...]
    ) -> None:
        """``height`` is negative where the first row is the upper one."""
        self._data = data
        self._place = place
        self._bits = bits
        self._masks = masks
        self._downwards = height < 0
        self._found = width, abs(height)
        super().__init__(BytesIO())

    def _open(self) -> None:
        self._size = self._found
        self._mode = "RGB"
        self.tile = []

    def load(self) -> Any:
        """Read the pixels; raises ``ValueError`` where the file ends before them."""
        if self._im is None:
            self.im = Image.fromarray(self._on_white()).im
        return Image.Image.load(self)

    def _on_white(self) -> npt.NDArray[np.uint8]:
        """uint8 ``[height, width, 3]``."""
        width, height = self._size
        # Rows begin at whole words of four bytes.
        row = (width * self._bits + 31) // 32 * 4
        if self._place + row * height > len(self._data):
            raise ValueError("its pixels are behind its end")
        rows = np.frombuffer(self._data, np.uint8, row * height, self._place).reshape(height, row)
        pixels = rows[:, : width * self._bits // 8].copy().view(f"<u{self._bits // 8}")
        red, green, blue, alpha = (_samples(pixels, mask) for mask in self._masks)
        shown = np.stack([red, green, blue], axis=-1)
        if self._masks[3]:
            shown -= 255
            shown *= alpha[..., None] / 255
            shown += 255
        return (shown if self._downwards else shown[::-1]).round().astype(np.uint8)


def _samples(pixels: npt.NDArray[Any], mask: int) -> npt.NDArray[np.float32]:
    """Those at the bits of a mask, 0 to 255; zeros without any."""
    if not mask:
        return np.zeros(pixels.shape, np.float32)
    shift = (mask & -mask).bit_length() - 1
    return ((pixels.astype(np.uint32) & mask) >> shift).astype(np.float32) * (255.0 / (mask >> shift))
