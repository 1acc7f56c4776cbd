"""Image headers: format and size of an encoded image, without decoding a pixel.

Nothing but the bytes decides the format, never a name or a media type. The readers here look at a few
fields and follow declared lengths forward only, so that their cost is bounded by the number of blocks in
the file whatever the file claims, and they neither allocate by a claimed size nor emit warnings.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from struct import unpack_from
from typing import Final

from tessera.errors import InvalidInput, PayloadTooLarge, UnsupportedMedia

MAX_PIXELS: Final = 64 * 1024 * 1024
"""Default limit of ``probe``; what a decoded image may take is three bytes for each."""

_ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 0x0100, 0x0101
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_TIFF_TAGS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """``width`` and ``height`` in pixels of the image as it is meant to be seen, EXIF orientation applied."""

    format: str
    width: int
    height: int


class _Broken(Exception):
    """The header contradicts its own format."""


_Size = tuple[int, int, int]
"""Stored width, stored height, orientation (1 to 8)."""


def probe(
    data: bytes, *, param: str, max_pixels: int = MAX_PIXELS, formats: Collection[str] | None = None
) -> ImageHeader:
    """Read the header of an encoded image.

    ``formats`` names the formats to serve, all of ``FORMATS`` when None. Raises ``UnsupportedMedia`` when
    the bytes are in none of them, ``InvalidInput`` when the header is broken or cut off, and
    ``PayloadTooLarge`` when the image has more than ``max_pixels`` pixels; all name ``param``.
    """
    served = FORMATS if formats is None else tuple(formats)
    name = _sniff(data)
    if name is None or name not in served:
        found = f"{name}, which is not served" if name else "something else"
        raise UnsupportedMedia(
            f"{param}: expected an image in {', '.join(served)}, found {found}", param=param
        )
    try:
        width, height, orientation = _READERS[name](data)
    except (struct.error, IndexError):
        raise InvalidInput(f"{param}: the {name} header is cut off", param=param) from None
    except _Broken as error:
        raise InvalidInput(f"{param}: the {name} header is broken: {error}", param=param) from None
    if width < 1 or height < 1:
        raise InvalidInput(f"{param}: the {name} image has no pixels ({width}x{height})", param=param)
    if width * height > max_pixels:
        raise PayloadTooLarge(
            f"{param}: the image has {width}x{height} pixels, the limit is {max_pixels} in all", param=param
        )
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(format=name, width=width, height=height)


def _sniff(data: bytes) -> str | None:
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "TIFF"
    # Two letters are a weak signature: the size of the header that follows has to make sense, too.
    if data.startswith(b"BM") and data[14:18] in _BMP_HEADERS:
        return "BMP"
    return None


def _jpeg(data: bytes) -> _Size:
    at, orientation = 2, None
    while True:
        if data[at] != 0xFF:
            raise _Broken(f"no marker at byte {at}")
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            continue
        if marker in (0xD9, 0xDA):
            raise _Broken("the pixels begin before their size is given")
        (length,) = unpack_from(">H", data, at)
        if length < 2:
            raise _Broken(f"a segment of {length} bytes")
        if marker == 0xE1 and orientation is None:
            orientation = _exif(data[at + 2 : at + length]) or _xmp(data[at + 2 : at + length])
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = unpack_from(">HH", data, at + 3)
            return width, height, orientation or _later_exif(data, at + length)
        at += length


def _later_exif(data: bytes, at: int) -> int:
    """Orientation from an EXIF segment that stands, oddly, between the frame header and the pixels."""
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] not in (b"", b"\xda", b"\xd9"):
        (length,) = unpack_from(">H", data, at + 2)
        if length < 2:
            break
        found = _exif(data[at + 4 : at + 2 + length]) if data[at + 1] == 0xE1 else None
        if found:
            return found
        at += 2 + length
    return 1


def _png(data: bytes) -> _Size:
    length, kind, width, height = unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise _Broken("it does not begin with IHDR")
    at, orientation = 8, None
    # The orientation may follow the pixels; it still turns the decoded image.
    while at + 8 <= len(data):
        length, kind = unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length] if kind in (b"eXIf", b"iTXt") else b""
        if kind == b"eXIf":
            orientation = _exif(body) or orientation
        elif kind == b"iTXt" and body.startswith(b"XML:com.adobe.xmp\0\0"):
            orientation = orientation or _xmp(body)
        elif kind == b"IEND":
            break
        at += 12 + length
    return width, height, orientation or 1


def _webp(data: bytes) -> _Size:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise _Broken("no key frame")
        width, height = unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF, 1
    if kind == b"VP8L":
        signature, bits = unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise _Broken("no lossless signature")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1
    if kind != b"VP8X":
        raise _Broken(f"unknown first chunk {kind!r}")
    flags, wide, high = data[20], data[24:27], data[27:30]
    if len(high) < 3:
        raise IndexError
    orientation, at = None, 12
    while flags & 0x0C and at + 8 <= len(data):
        kind, length = unpack_from("<4sI", data, at)
        if kind == b"EXIF" and flags & 0x08:
            orientation = _exif(data[at + 8 : at + 8 + length]) or orientation
        elif kind == b"XMP " and flags & 0x04:
            orientation = orientation or _xmp(data[at + 8 : at + 8 + length])
        at += 8 + length + (length & 1)
    return int.from_bytes(wide, "little") + 1, int.from_bytes(high, "little") + 1, orientation or 1


def _gif(data: bytes) -> _Size:
    width, height, flags = unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while data[at] == 0x21:
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    if data[at] != 0x2C:
        raise _Broken("no image follows the header")
    left, top, wide, high = unpack_from("<HHHH", data, at + 1)
    # A frame that reaches over the screen's edge makes decoders grow the image.
    return max(width, left + wide), max(height, top + high), 1


_BMP_HEADERS: Final = tuple(struct.pack("<I", size) for size in (12, 40, 52, 56, 64, 108, 124))


def _bmp(data: bytes) -> _Size:
    if data[14] == 12:
        width, height = unpack_from("<HH", data, 18)
        return width, height, 1
    width, height = unpack_from("<ii", data, 18)
    return width, abs(height), 1


def _tiff(data: bytes) -> _Size:
    tags = _ifd(data)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise _Broken("no width or height")
    return tags[_WIDTH], tags[_HEIGHT], _valid(tags.get(_ORIENTATION)) or 1


def _exif(segment: bytes) -> int | None:
    """Orientation in an EXIF block; None when it has none or makes no sense, as image viewers do."""
    try:
        return _valid(_ifd(segment.removeprefix(b"Exif\0\0")).get(_ORIENTATION))
    except (struct.error, _Broken):
        return None


def _xmp(segment: bytes) -> int | None:
    found = _XMP_ORIENTATION.search(segment)
    return _valid(int(found[1])) if found else None


def _valid(orientation: int | None) -> int | None:
    return orientation if orientation is not None and 1 <= orientation <= 8 else None


def _ifd(data: bytes) -> dict[int, int]:
    """The single SHORT and LONG values of a TIFF structure's first directory."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    if order is None:
        raise _Broken("no TIFF signature")
    (at,) = unpack_from(order + "I", data, 4)
    (count,) = unpack_from(order + "H", data, at)
    if count > _TIFF_TAGS:
        raise _Broken(f"a directory of {count} entries")
    tags: dict[int, int] = {}
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, values = unpack_from(order + "HHI", data, entry)
        if values == 1 and kind in (3, 4):
            (tags[tag],) = unpack_from(order + ("H" if kind == 3 else "I"), data, entry + 8)
    return tags


_READERS: Final[dict[str, Callable[[bytes], _Size]]] = {
    "JPEG": _jpeg,
    "PNG": _png,
    "WEBP": _webp,
    "GIF": _gif,
    "BMP": _bmp,
    "TIFF": _tiff,
}
FORMATS: Final = tuple(_READERS)
