"""HEIC and AVIF files: their size by their boxes, and their pixels by the library that reads the format.

Phones write them. Pillow brings libavif; ``pillow-heif`` with libheif and its codecs is an extra: it has 27
MB, and x265 in its wheel is under the GPL. Both libraries parse a file when they open it, so nothing but a
decoder opens one: before that, what a prompt needs of a file is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final

from PIL import AvifImagePlugin, ExifTags, Image, ImageFile, UnidentifiedImageError

from tessera.errors import UnsupportedMedia
from tessera.extras import absent, lack
from tessera.tiff import UPRIGHT

MARK: Final = b"ftyp"
"""Behind the first four bytes of a file."""

_AVIF: Final = (b"avif", b"avis")
_HEIC: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")
_CONTAINERS: Final = (*_AVIF, *_HEIC, b"mif1", b"msf1")
_FRAMES: Final = (b"av01", b"hvc1", b"hev1")
_MAX_BOXES: Final = 10_000
_PACKAGE: Final = "pillow_heif"

# Of the calling thread alone: a confined process can start none.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def format_of(data: bytes) -> str | None:
    """``AVIF``, ``HEIF``, or None for a file that is neither."""
    if data[4:8] != MARK or data[8:12] not in _CONTAINERS:
        return None
    size = min(int.from_bytes(data[:4], "big"), len(data), 1024)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, size - 3, 4))}
    return "AVIF" if brands & {*_AVIF} and data[8:12] not in _HEIC else "HEIF"


def installed() -> bool:
    """Whether HEIC files are read."""
    return not absent(_PACKAGE)


def needs_threads() -> bool:
    """Whether a decoder must be able to start threads: libde265 always has one of its own."""
    return installed()


def load_codecs() -> None:
    """Import what is installed, before the process is confined."""
    if installed():
        import pillow_heif

        pillow_heif.options.DECODE_THREADS = 0
        pillow_heif.register_heif_opener(thumbnails=False)


class HeifFile(ImageFile.ImageFile):
    """The primary picture of a file, upright as its boxes say; EXIF's orientation does not count."""

    def __init__(self, data: bytes, kind: str, *, param: str) -> None:
        """Raises ``UnsupportedMedia`` for what nothing that is installed reads, and ``ValueError``."""
        if kind == "HEIF" and not installed():
            needs = lack("pillow-heif", extra="heic")
            raise UnsupportedMedia(f"{param} is a HEIC file, which {needs}", param=param)
        self._data = data
        self.format = kind
        super().__init__(BytesIO())

    def _open(self) -> None:
        self._size = _size(self._data, cropped=self.format == "HEIF")
        self._mode = "RGB"
        self.tile = []

    def load(self) -> Any:
        """Read the pixels; raises ``ValueError`` and ``OSError``."""
        if self._im is None:
            load_codecs()
            with self._opened() as image:
                turn = 1
                # By which Pillow would turn it where the boxes do not.
                image.info.pop("xmp", None)
                if self.format == "AVIF":
                    # Where Pillow has what the boxes say; libheif turns the picture itself.
                    turn = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
                image.load()
                found = image.transpose(UPRIGHT[turn]) if turn in UPRIGHT else image.copy()
            if found.size != self._size:
                raise ValueError("its size is ambiguous")
            self.im, self._mode = found.im, found.mode
        return Image.Image.load(self)

    def _opened(self) -> Image.Image:
        try:
            return Image.open(BytesIO(self._data), formats=(str(self.format),))
        except UnidentifiedImageError:
            # Chromium shows some that libavif refuses, such as those whose alpha does not say its size.
            raise ValueError(f"it breaks the rules of {self.format} files") from None


Box = tuple[bytes, int, int]


def _size(data: bytes, *, cropped: bool) -> tuple[int, int]:
    """The upright size of the primary picture in pixels; raises ``ValueError`` where no box has it."""
    try:
        meta = _box(data, b"meta", 0, len(data), skipped=4)
        _box(data, b"pitm", *meta)
    except ValueError:
        return _size_of_frames(data)
    at = _box(data, b"pitm", *meta)[0]
    primary = int.from_bytes(data[at + 4 : at + (6 if data[at] == 0 else 8)], "big")
    properties = _box(data, b"iprp", *meta)
    known = list(_boxes(data, *_box(data, b"ipco", *properties)))
    size, turned = None, False
    for index in _properties_of(data, primary, *properties):
        if not 0 < index <= len(known):
            continue
        name, begin, end = known[index - 1]
        if name == b"ispe" and begin + 12 <= end:
            size = struct.unpack_from(">II", data, begin + 4)
        elif name == b"irot" and begin < end:
            turned ^= bool(data[begin] & 1)
        elif name == b"clap" and begin + 16 <= end and cropped:
            width, of_width, height, of_height = struct.unpack_from(">IIII", data, begin)
            if of_width and of_height:
                size = width // of_width, height // of_height
    if size is None:
        raise ValueError("it does not say its size")
    return (size[1], size[0]) if turned else (size[0], size[1])


def _size_of_frames(data: bytes) -> tuple[int, int]:
    """The size of a sequence without a picture (ISO/IEC 14496-12, 12.1.3); raises ``ValueError``."""
    movie = _box(data, b"moov", 0, len(data))
    for name, begin, end in _boxes(data, *movie):
        if name != b"trak":
            continue
        place = begin, end
        for inner in (b"mdia", b"minf", b"stbl"):
            place = _box(data, inner, *place)
        for name, begin, end in _boxes(data, *_box(data, b"stsd", *place, skipped=8)):
            if name in _FRAMES and begin + 28 <= end:
                width, height = struct.unpack_from(">HH", data, begin + 24)
                return width, height
    raise ValueError("it does not say its size")


def _properties_of(data: bytes, item: int, begin: int, end: int) -> Iterator[int]:
    """The numbers of an item's properties, from 1, in the order in which they count."""
    for name, at, last in _boxes(data, begin, end):
        if name != b"ipma" or at + 8 > last:
            continue
        version, wide = data[at], data[at + 3] & 1
        (count,) = struct.unpack_from(">I", data, at + 4)
        at += 8
        for _ in range(min(count, _MAX_BOXES)):
            nbytes = 2 if version < 1 else 4
            found = int.from_bytes(data[at : at + nbytes], "big")
            at += nbytes
            if at >= last:
                return
            associations, at = data[at], at + 1
            for _ in range(associations):
                step = 2 if wide else 1
                index = int.from_bytes(data[at : at + step], "big") & (0x7FFF if wide else 0x7F)
                at += step
                if found == item and at <= last:
                    yield index


def _box(data: bytes, wanted: bytes, begin: int, end: int, skipped: int = 0) -> tuple[int, int]:
    for name, first, last in _boxes(data, begin, end):
        if name == wanted:
            return first + skipped, last
    raise ValueError(f"it has no box {wanted.decode()}")


def _boxes(data: bytes, begin: int, end: int) -> Iterator[Box]:
    """The boxes that stand one behind the other: name, begin and end of what they hold."""
    for _ in range(_MAX_BOXES):
        if begin + 8 > end:
            return
        size, name = struct.unpack_from(">I4s", data, begin)
        head = 8
        if size == 1 and begin + 16 <= end:
            (size,) = struct.unpack_from(">Q", data, begin + 8)
            head = 16
        last = end if size == 0 else begin + size
        if last > end or last < begin + head:
            return
        yield name, begin + head, last
        begin = last
