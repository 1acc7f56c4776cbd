"""Image files: opened for the frontend, decoded to upright RGB for every model family.

Pillow recognises a file by its content and reads its header; no pixel is decoded before ``load``. What it
may do until then is bounded: the number of reads (chains of empty blocks), the size of a TIFF's tables,
and the pixels a header may announce. Both sides of a hand-off use the same opener and the same rule for
the orientation, so the size that a prompt was built for is the size that is decoded.

What an image is, before a family resizes or cuts it:

- the only page of a TIFF file: of several none is the image, see ``tiff``;
- the first frame of an animation, white where it does not cover its canvas;
- turned upright by its EXIF orientation, and not by what XMP says, as a browser shows it;
- transparency composited on white;
- 16-bit samples reduced to their high byte, for grey as for colour;
- CMYK, YCbCr, palette, grey and bilevel converted to RGB by Pillow, colour profiles ignored;
- of a PNG without a profile, samples of another brightness (gAMA) as sRGB.

Float samples and integers beyond 16 bits have no agreed white, so they are refused.

A plain JPEG (three colours of 8 bits, upright, nothing unusual) is read without Pillow. Both go through
libjpeg-turbo with the same settings, so the pixels are the same, but without it they are decoded straight to
where they are read from: a tile of 512 x 512 pixels takes 0.74 ms and not 1.0. Resizing is most of the time
of any other size, see ``resampling``.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from tessera import bmp, heif, png, tiff
from tessera.compositing import Transparency, to_rgb
from tessera.errors import InvalidInput, PayloadTooLarge, RequestError, UnsupportedMedia
from tessera.file_kinds import kind_of
from tessera.heif import needs_threads as needs_threads
from tessera.resampling import REACHES, compiled
from tessera.tiff import UPRIGHT

Levels = npt.NDArray[np.uint32]
"""uint32 ``[height, width]``: red in the lowest byte, then green, then blue. The highest is nobody's."""

_OF_PILLOW: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
FORMATS: Final = (*_OF_PILLOW, "AVIF")
"""Those that every installation reads; HEIC needs a package, see ``heif``."""

MAX_PIXELS: Final = 1 << 27
"""No setting goes beyond it; a decoded image takes four bytes for each pixel."""

_MAX_READS: Final = 20_000
_MAX_TIFF_BYTES: Final = 4 << 20
_MAX_EXIF_BYTES: Final = 1 << 20
# Of which the first frame may be a part of the canvas.
_WITH_FRAMES: Final = ("GIF", "WEBP")
# What Pillow says of a file whose pixels are not what they look like.
_MARKS: Final = frozenset({"transparency", "gamma"})
_XMP: Final = ("xmp", "XML:com.adobe.xmp")

# Pillow warns from its limit on and raises from twice that. At our ceiling it never has anything to say
# about an image that is accepted.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
# Its remarks on damaged metadata quote the file: senders could fill the log, and the memory in which
# Python notes which texts it has shown.
warnings.filterwarnings("ignore", module=r"PIL\.")


def media_types() -> tuple[str, ...]:
    """Return the media types of what this installation reads, as ``image/jpeg``."""
    names = (*FORMATS, *(("HEIC", "HEIF") if heif.installed() else ()))
    return tuple(f"image/{name.lower()}" for name in names)


def load_codecs() -> None:
    """Load what is loaded late, so that a process can be confined after this."""
    from PIL import ImageCms  # noqa: F401  Colours of LAB.

    Image.init()
    heif.load_codecs()
    compiled()
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    decode(file.getvalue(), param="warm-up")


def open_image(data: bytes, *, param: str, max_pixels: int = MAX_PIXELS) -> ImageFile.ImageFile:
    """Open an image file without decoding it; raises as ``Picture``, which knows ``max_pixels``."""
    with image_errors(param, max_pixels=max_pixels):
        if data[:4] in tiff.MAGIC or (data[4:8] == heif.MARK and heif.format_of(data) is not None):
            image = _open_container(data, param=param)
        else:
            image = _open_other(data, param=param)
        for name in _XMP:
            # Pillow would turn the image by it.
            image.info.pop(name, None)
        width, height = image.size
        if width < 1 or height < 1:
            raise InvalidInput(f"{param}: the image has no pixels ({width}x{height})", param=param)
        return image


def _open_other(data: bytes, *, param: str) -> ImageFile.ImageFile:
    """Open what is no container, by Pillow where it shows what the file does."""
    if data.startswith(png.MAGIC):
        data = png.needed(data)
    try:
        if data[:2] in (b"II", b"MM"):
            # Pillow also reads dialects of TIFF to which no decoder here is put.
            raise UnidentifiedImageError("not a TIFF")
        own = bmp.open_bmp(data) if data.startswith(bmp.MAGIC) else None
        return own or _open_by_pillow(data)
    except UnidentifiedImageError:
        _refuse(data, param)
        raise


def _refuse(data: bytes, param: str) -> None:
    """Raise ``UnsupportedMedia`` that names what a file is, where that is known."""
    if (kind := kind_of(data)) is not None:
        raise UnsupportedMedia(
            f"{param} is {kind}, which is not read as an image; served are {', '.join(FORMATS)}",
            param=param,
        ) from None


def _open_by_pillow(data: bytes) -> ImageFile.ImageFile:
    file = _MeteredFile(data)
    image = Image.open(file, formats=_OF_PILLOW)
    # For the decoder.
    file.reads_left = None
    return image


def _open_container(data: bytes, *, param: str) -> ImageFile.ImageFile:
    """Open a TIFF, AVIF or HEIC file, by Pillow where it shows what the file does."""
    if (kind := heif.format_of(data)) is not None:
        return heif.HeifFile(data, kind, param=param)
    data, own = tiff.open_tiff(data, param=param)
    try:
        return own or _open_by_pillow(data)
    except UnidentifiedImageError:
        raise tiff.unread(data, param=param) from None


def orientation(image: ImageFile.ImageFile) -> int:
    """The EXIF orientation, 1 to 8, that is still to be undone after decoding; ask before ``load``.

    What stands after the pixels is not looked at, unreadable metadata counts as none, and TIFF, AVIF and HEIC
    are turned upright by their decoders.
    """
    if image.format == "TIFF" or isinstance(image, heif.HeifFile):
        return 1
    try:
        if len(image.info.get("exif", b"")) > _MAX_EXIF_BYTES:
            return 1
        # The base class's method: the one for PNG decodes the pixels to reach what follows them.
        turn = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's readers raise whatever a malformed block leads them to
        return 1
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


@contextmanager
def image_errors(param: str, *, max_pixels: int = MAX_PIXELS) -> Iterator[None]:
    """Turn whatever Pillow raises over a file into this service's errors."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise whatever a malformed file leads them to
        raise _refusal(error, param, max_pixels) from error


def _refusal(error: Exception, param: str, max_pixels: int) -> RequestError:
    if isinstance(error, UnidentifiedImageError):
        return UnsupportedMedia(
            f"{param} is no image of a served format ({', '.join(FORMATS)}), or its header is damaged",
            param=param,
        )
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        # Pillow's own limit is above the one that holds, and its words are all that it gives.
        pixels = re.search(r"\d+", str(error))
        return _too_many_pixels(param, pixels[0] if pixels else "too many", max_pixels)
    return _damaged(param, error)


def _damaged(param: str, why: object) -> InvalidInput:
    return InvalidInput(f"{param} is a damaged image: {why}", param=param)


def _too_many_pixels(param: str, pixels: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{param}: the image has {pixels} pixels, the limit is {limit} in all", param=param
    )


class _MeteredFile(BytesIO):
    """Bounds what reading a header may cost, whatever the file claims about itself.

    Pillow's readers take at least one read for each block of a file, and hold a TIFF's tables as objects
    many times their size. Without ``reads_left`` there is no limit.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left: int | None = _MAX_READS
        self._nbytes = _MAX_TIFF_BYTES if data[:4] in tiff.MAGIC else len(data) * 4 + 1024

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self.reads_left is not None:
            self.reads_left -= 1
            self._nbytes -= len(data)
            if self.reads_left < 0 or self._nbytes < 0:
                raise ValueError("the header goes on for too long")
        return data


# Markers of ITU-T T.81, table B.1.
_JPEG_START: Final = b"\xff\xd8"
_JPEG_SCAN: Final = 0xDA
# Baseline, extended sequential and progressive, with Huffman codes.
_JPEG_FRAMES: Final = (0xC0, 0xC1, 0xC2)
# Tables, restart intervals, comments, JFIF, and Adobe's mark, by which the decoder knows how colours are
# stored. EXIF and XMP may turn the picture; other frames may follow it.
_JPEG_SKIPPED: Final = (0xC4, 0xDB, 0xDD, 0xE0, 0xE2, 0xEE, 0xFE)
# What those for applications begin with, and how long they then are at least: Pillow refuses shorter ones.
_JPEG_NAMES: Final = {0xE0: (b"JFIF", 16), 0xE2: (b"ICC_PROFILE\0", 16), 0xEE: (b"Adobe", 14)}
_JPEG_SEGMENTS: Final = 64


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of a plain JPEG; None for any other file, and for a damaged header.

    The segments are walked up to the scan.
    """
    if not data.startswith(_JPEG_START):
        return None
    at, size = len(_JPEG_START), None
    for _ in range(_JPEG_SEGMENTS):
        if len(data) < at + 4:
            return None
        mark, kind, length = struct.unpack_from(">BBH", data, at)
        if mark != 0xFF or length < 2 or len(data) < at + 2 + length:
            return None
        if kind == _JPEG_SCAN:
            return size
        if kind in _JPEG_FRAMES:
            if size is not None or length != 17:
                return None
            depth, height, width, colours = struct.unpack_from(">BHHB", data, at + 4)
            if depth != 8 or colours != 3 or not width or not height:
                return None
            size = width, height
        elif kind not in _JPEG_SKIPPED:
            return None
        if kind in _JPEG_NAMES:
            name, least = _JPEG_NAMES[kind]
            if length < least or not data.startswith(name, at + 4):
                return None
        at += 2 + length
    return None


def plain_jpeg_pixels(data: bytes, size: tuple[int, int]) -> Levels | None:
    """Return the levels of a plain JPEG.

    None for what is not plain, and for a file over which the decoder has anything to remark, of which Pillow
    knows what can be forgiven.
    """
    if plain_jpeg_size(data) != size:
        return None
    width, height = size
    pixels = np.empty((height, width, 4), np.uint8)
    try:
        decoded = simplejpeg.decode_jpeg(data, "RGBX", buffer=pixels)
    except ValueError:
        return None
    return pixels.view("<u4")[..., 0] if decoded.shape == pixels.shape else None


Part = tuple[int, int, int, int]
"""Left, upper, right and lower edge in pixels."""

_MOST_RESIZED: Final = 1 << 24


class Picture:
    """The upright RGB image in a file, of which only the header has been read.

    ``size`` is its width and height in pixels. Raises ``UnsupportedMedia`` for bytes that are no image of a
    served format, ``InvalidInput`` for a header that makes no sense, ``PayloadTooLarge`` above
    ``max_pixels``; all name ``param``.
    """

    def __init__(self, data: bytes, *, param: str, max_pixels: int = MAX_PIXELS) -> None:
        self.data = data
        self.param = param
        max_pixels = min(max_pixels, MAX_PIXELS)
        size = plain_jpeg_size(data)
        self._opened: ImageFile.ImageFile | None = None
        if size is None:
            # Kept: Pillow reads a header in some forty steps, a tenth of what a small image takes.
            self._opened = open_image(data, param=param, max_pixels=max_pixels)
            size = self._opened.size
        width, height = size
        if width * height > max_pixels:
            raise _too_many_pixels(param, f"{width}x{height}", max_pixels)
        turned = self._opened is not None and orientation(self._opened) >= 5
        self.size = (height, width) if turned else (width, height)

    @classmethod
    def of(cls, image: Image.Image, *, param: str) -> Picture:
        """Return the picture of an image that is decoded already, upright and RGB."""
        picture = cls.__new__(cls)
        picture.data, picture.param, picture.size, picture._opened = b"", param, image.size, None
        picture.image = image
        return picture

    @cached_property
    def image(self) -> Image.Image:
        """The image as Pillow decodes it, by the decoder beneath it where that is plain.

        Raises ``UnsupportedMedia`` for an unsupported pixel format or a header that Pillow does not read,
        ``InvalidInput`` for an image that does not decode.
        """
        opened, self._opened = self._opened, None
        if opened is None and (plain := plain_jpeg_pixels(self.data, self.size)) is not None:
            # 0.84 ms for 512 x 512 pixels, and 8.0 for 1,275 x 1,650; Pillow's own way takes 1.3 and 9.1.
            return Image.frombytes("RGB", self.size, plain, "raw", "RGBX")
        return self._by_pillow(opened or open_image(self.data, param=self.param))

    @cached_property
    def levels(self) -> Levels:
        """The image as numbers, of a plain JPEG without Pillow; raises as ``image``."""
        plain = None
        if self._opened is None and "image" not in self.__dict__:
            plain = plain_jpeg_pixels(self.data, self.size)
        return _levels_of(self.image) if plain is None else plain

    def _by_pillow(self, opened: ImageFile.ImageFile) -> Image.Image:
        with image_errors(self.param), opened as image:
            # Before loading: what a file says about itself behind its pixels does not count.
            turn, size = orientation(image), image.size
            if image.format == "PNG" and image.info.get("default_image"):
                # What is shown where nothing moves, and no part of the animation.
                image.seek(1)
            marked = image.format in _WITH_FRAMES or not _MARKS.isdisjoint(image.info)
            transparency = Transparency.of(image, self.data) if marked else None
            image.load()
            plain = image.mode == "RGB" and transparency is None
            found = image if plain else to_rgb(image, transparency, param=self.param)
            upright = found if turn == 1 else found.transpose(UPRIGHT[turn])
            if image.size != size or upright.size != self.size:
                raise _damaged(self.param, "its size is ambiguous")
            return upright

    def write(
        self,
        planes: npt.NDArray[np.uint8],
        size: tuple[int, int],
        *,
        resample: Image.Resampling = Image.Resampling.BICUBIC,
        part: Part | None = None,
    ) -> None:
        """Write the image, resized to ``size`` (width, height), into uint8 ``[3, ...]``; raises as ``image``.

        With a ``part`` only this of what the image is resized to. What follows the three colours may be cut
        up in any way: its elements, counted row by row, are the pixels.
        """
        levels = self._resized(size, resample, part)
        for colour, plane in enumerate(planes):
            plane[...] = (levels >> 8 * colour).reshape(plane.shape)

    def _resized(self, size: tuple[int, int], resample: Image.Resampling, part: Part | None) -> Levels:
        """``part`` of what the image is when it is resized; ``MemoryError`` where there is none for that."""
        # The widened support of Pillow's filters is the antialiasing that the references rely on.
        if size == self.size:
            levels = self.levels
        elif resample in REACHES and (library := compiled()) and library.resizes(*self.size, *size):
            before, levels = self.levels, np.empty(size[::-1], np.uint32)
            if not library.resize(before, *before.shape[::-1], levels, *size, REACHES[resample]):
                raise MemoryError("no memory for resizing an image")
        else:
            image = self.image
            image = image.resize(size, resample) if part is None else _part_of(image, size, resample, part)
            return _levels_of(image)
        left, upper, right, lower = part or (0, 0, *size)
        return levels[upper:lower, left:right]


def _levels_of(image: Image.Image) -> Levels:
    return np.frombuffer(image.tobytes("raw", "RGBX"), "<u4").reshape(image.height, image.width)


def _part_of(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling, part: Part
) -> Image.Image:
    """Return the ``part`` of what an image resized to ``size`` is.

    Of what would have more than 16 million pixels only the part is computed: a strip of 16,384 by 1 pixels
    would become one of a billion. Pillow then may go over the two axes in another order, which changes
    levels by up to 2 of 255.
    """
    if size[0] * size[1] <= _MOST_RESIZED:
        return image.resize(size, resample).crop(part)
    across, down = image.width / size[0], image.height / size[1]
    left, upper, right, lower = part
    box = left * across, upper * down, min(right * across, image.width), min(lower * down, image.height)
    return image.resize((right - left, lower - upper), resample, box)


def bitmap(image: Image.Image, *, param: str) -> bytes:
    """Return an image that a program holds as a BMP file, upright and RGB; raises as ``Picture.image``.

    One that was opened from a file is turned as ``Picture`` turns that file; one that was made is upright.
    """
    with image_errors(param):
        turn = orientation(image) if isinstance(image, ImageFile.ImageFile) else 1
        transparency = Transparency.of(image)
        image.load()
        file = BytesIO()
        found = to_rgb(image, transparency, param=param)
        (found if turn == 1 else found.transpose(UPRIGHT[turn])).save(file, "BMP")
        return file.getvalue()


def decode(data: bytes, *, param: str) -> Image.Image:
    """The upright RGB image in ``data``; thread-safe. Raises as ``Picture`` and its ``image``."""
    return Picture(data, param=param).image
