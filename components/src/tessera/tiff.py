"""TIFF files: the pages in them, and the pixels of kinds that Pillow refuses or misreads.

Pillow 13 shows, without a word, 16-bit planes without compression as noise, 12-bit grey as black, 16-bit
WhiteIsZero as its negative and signed bytes as unsigned ones; grey of 16 bits with alpha it refuses. Such
files are read here: Pillow, and libtiff below it, undo the compression of their bytes, and NumPy makes
samples of them. Everything else is Pillow's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from tessera.errors import InvalidInput, UnsupportedMedia

Bytes = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.uint16]

_MAX_ENTRIES: Final = 500_000
# Of a file whose pages are not wanted: a microsecond each.
_MAX_HEADER_ENTRIES: Final = 20_000

_CLASSIC: Final = {b"II*\0": "<", b"MM\0*": ">"}
_BIG: Final = (b"II+\0", b"MM\0+")
MAGIC: Final = (*_CLASSIC, *_BIG)
"""What files of every dialect begin with."""
# BYTE, ASCII, SHORT, LONG, RATIONAL and so on: TIFF 6.0, page 15, and IFD.
_SIZES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_NUMBERS: Final = {1: "B", 3: "H", 4: "I", 13: "I"}
_MAX_VALUES: Final = 1 << 20
# Whose bits are taken apart at a time: two bytes for each.
_LINES: Final = 64

_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 254, 256, 257, 258, 259, 262
_FILL_ORDER, _STRIPS, _ORIENTATION, _SAMPLES, _STRIP_ROWS = 266, 273, 274, 277, 278
_STRIP_BYTES, _PLANES, _PREDICTOR, _PALETTE = 279, 284, 317, 320
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 322, 323, 324, 325
_EXTRA, _SAMPLE_FORMAT, _OLD_JPEG = 338, 339, 513
# Places in a file that a page can do without: metadata, and pictures beside it.
_POINTERS: Final = (330, 400, 34665, 34853, 40965)
# A smaller version of another picture, and a mask for one.
_NO_PAGE: Final = 1 | 4

# Those that have bytes in and bytes out, whatever the bytes are of: none, LZW, Deflate, PackBits, Zstandard.
_OF_BYTES: Final = (1, 5, 8, 32773, 32946, 50000)
_JPEG: Final = (6, 7)
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _OF_PALETTE, _CMYK = 0, 1, 2, 3, 5
_COLOURS: Final = {_WHITE_IS_ZERO: 1, _BLACK_IS_ZERO: 1, _RGB: 3, _OF_PALETTE: 1, _CMYK: 4}
_ASSOCIATED, _UNASSOCIATED = 1, 2


@dataclass(frozen=True, slots=True)
class Directory:
    """A page's tags; of each its type, its count, and the place of its values."""

    data: bytes
    order: str
    place: int
    entries: dict[int, tuple[int, int, int]]
    following: int

    def raw(self, tag: int) -> bytes:
        """Return the bytes of a tag's values; raises ``ValueError`` where the file ends before them."""
        kind, count, place = self.entries[tag]
        size = _SIZES.get(kind, 1) * count
        if place + size > len(self.data):
            raise ValueError(f"the values of tag {tag} are behind its end")
        return self.data[place : place + size]

    def numbers(self, tag: int, default: Sequence[int] = ()) -> Sequence[int]:
        """Return a tag's whole numbers; raises ``ValueError`` for others, and as ``raw``."""
        if tag not in self.entries:
            return default
        kind, count, _ = self.entries[tag]
        if kind not in _NUMBERS or not 0 < count <= _MAX_VALUES:
            raise ValueError(f"tag {tag} has {count} values of type {kind}")
        return struct.unpack(f"{self.order}{count}{_NUMBERS[kind]}", self.raw(tag))

    def number(self, tag: int, default: int) -> int:
        """Return a tag's first number; raises as ``numbers``."""
        return self.numbers(tag, (default,))[0]


def pages(data: bytes, *, most_entries: int = _MAX_ENTRIES) -> Iterator[Directory]:
    """The directories that are pages of their own: no thumbnails, no masks. None of what is no classic TIFF.

    A chain that leads nowhere or back ends there, and behind ``most_entries``. Where all are marked as
    something else, the first is the page.
    """
    first: Directory | None = None
    any_page = False
    for directory in _directories(data, most_entries):
        first = first or directory
        try:
            marked = directory.number(_SUBFILE, 0) & _NO_PAGE
        except ValueError:
            marked = 0
        if not marked:
            any_page = True
            yield directory
    if first is not None and not any_page:
        yield first


def _directories(data: bytes, most_entries: int) -> Iterator[Directory]:
    order = _CLASSIC.get(data[:4])
    if order is None or len(data) < 8:
        return
    seen: set[int] = set()
    (place,) = struct.unpack_from(f"{order}I", data, 4)
    while place and place not in seen and place + 2 <= len(data):
        seen.add(place)
        (count,) = struct.unpack_from(f"{order}H", data, place)
        end = place + 2 + 12 * count
        most_entries -= count + 1
        if end > len(data) or most_entries < 0:
            return
        entries: dict[int, tuple[int, int, int]] = {}
        for at in range(place + 2, end, 12):
            tag, kind, number = struct.unpack_from(f"{order}HHI", data, at)
            inside = _SIZES.get(kind, 1) * number <= 4
            entries[tag] = (
                kind,
                number,
                at + 8 if inside else struct.unpack_from(f"{order}I", data, at + 8)[0],
            )
        # Some writers leave out that no other follows.
        following = struct.unpack_from(f"{order}I", data, end)[0] if end + 4 <= len(data) else 0
        yield Directory(data, order, place, entries, following)
        place = following


def cut(page: Directory) -> bytes:
    """Return a page as a file of its own, with its pixels as they are stored; raises ``ValueError``."""
    tiled = _TILES in page.entries
    parts_tag, sizes_tag = (_TILES, _TILE_BYTES) if tiled else (_STRIPS, _STRIP_BYTES)
    if page.number(_COMPRESSION, 1) == 6 or _OLD_JPEG in page.entries or sizes_tag not in page.entries:
        # Tables of an old JPEG lie anywhere, and without sizes nobody knows where a strip ends.
        (count,) = struct.unpack_from(f"{page.order}H", page.data, page.place)
        end = page.place + 2 + 12 * count
        # No other page follows it.
        return _headed(page, page.place) + page.data[8:end] + bytes(4) + page.data[end + 4 :]
    places, sizes = page.numbers(parts_tag), page.numbers(sizes_tag)
    if len(places) != len(sizes):
        raise ValueError(f"{len(places)} parts and {len(sizes)} sizes of them")
    if sum(sizes) > len(page.data):
        raise ValueError("its parts are larger than the file")
    out = bytearray(_headed(page, 8))
    kept = {tag: entry for tag, entry in page.entries.items() if tag not in _POINTERS}
    out += struct.pack(f"{page.order}H", len(kept)) + bytes(12 * len(kept) + 4)
    moved = []
    for place, size in zip(places, sizes, strict=True):
        moved.append(len(out))
        out += page.data[place : place + size]
        out += bytes(len(out) % 2)
    for index, (tag, (kind, count, _)) in enumerate(sorted(kept.items())):
        values = page.raw(tag)
        if tag == parts_tag:
            kind, count, values = 4, len(moved), struct.pack(f"{page.order}{len(moved)}I", *moved)
        if len(values) > 4:
            place = len(out)
            out += values + bytes(len(values) % 2)
            values = struct.pack(f"{page.order}I", place)
        struct.pack_into(f"{page.order}HHI4s", out, 10 + 12 * index, tag, kind, count, values)
    return bytes(out)


def _headed(page: Directory, place: int) -> bytes:
    return page.data[:4] + struct.pack(f"{page.order}I", place)


def open_tiff(data: bytes, *, param: str) -> tuple[bytes, ImageFile.ImageFile | None]:
    """Return a file whose first directory is its page; and it opened, where Pillow would not show it rightly.

    Raises ``InvalidInput`` for several pages, and ``UnsupportedMedia`` for kinds that nothing here reads.
    """
    if data[:4] in _BIG:
        raise UnsupportedMedia(
            f"{param} is a BigTIFF file; save it as a TIFF with 32-bit offsets", param=param
        )
    there = pages(data, most_entries=_MAX_HEADER_ENTRIES)
    page = next(there, None)
    if page is None:
        return data, None
    if next(there, None) is not None:
        raise InvalidInput(
            f"{param} is a TIFF file of several pages, and an image has one; send each page as an image of "
            "its own",
            param=param,
        )
    try:
        samples = _Layout.of(page)
    except ValueError as error:
        raise InvalidInput(f"{param} is a damaged image: {error}", param=param) from None
    if (reason := samples.refusal()) is not None:
        raise UnsupportedMedia(f"{param} is a TIFF file {reason}", param=param)
    if page.place != struct.unpack_from(f"{page.order}I", data, 4)[0]:
        data = _headed(page, page.place) + data[8:]
    return data, SampledTiff(samples) if samples.misread else None


def unread(data: bytes, *, param: str) -> UnsupportedMedia:
    """Return why Pillow did not recognise a TIFF file, as far as its tags say it."""
    said = "or its header is damaged"
    page = next(pages(data, most_entries=_MAX_HEADER_ENTRIES), None)
    with suppress(ValueError, TypeError):
        if page is not None:
            layout = _Layout.of(page)
            said = (
                f"with {layout.samples} samples of {layout.bits[0]} bits, photometric interpretation "
                f"{layout.photometric} and compression {layout.compression}, {said}"
            )
    return UnsupportedMedia(
        f"{param} is a TIFF file of a kind that is not read, {said}; convert it to RGB with 8 bits",
        param=param,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How a page's samples are stored. ``extra`` is what each beyond the colours is."""

    page: Directory
    width: int
    height: int
    bits: tuple[int, ...]
    samples: int
    photometric: int
    compression: int
    planes: bool
    reversed_bits: bool
    format: int
    extra: tuple[int, ...]

    @classmethod
    def of(cls, page: Directory) -> _Layout:
        compression = page.number(_COMPRESSION, 1)
        samples = page.number(_SAMPLES, 1)
        bits = tuple(page.numbers(_BITS, (1,)))
        formats = set(page.numbers(_SAMPLE_FORMAT, (1,)))
        return cls(
            page=page,
            width=page.number(_WIDTH, 0),
            height=page.number(_HEIGHT, 0),
            bits=bits * samples if len(bits) == 1 and samples <= 64 else bits[: max(1, samples)],
            samples=samples,
            photometric=page.number(_PHOTOMETRIC, _WHITE_IS_ZERO),
            compression=compression,
            planes=page.number(_PLANES, 1) == 2 and samples > 1,
            reversed_bits=page.number(_FILL_ORDER, 1) == 2,
            format=formats.pop() if len(formats) == 1 else 0,
            extra=tuple(page.numbers(_EXTRA)) if page.entries.get(_EXTRA, (0, 0, 0))[1] else (),
        )

    @property
    def colours(self) -> int:
        return _COLOURS.get(self.photometric, self.samples)

    @property
    def narrow_palette(self) -> bool:
        """Whether a palette has numbers of 8 bits where they should have 16, as some scanners write it."""
        return max(self.page.numbers(_PALETTE, (0,))) < 256

    @property
    def misread(self) -> bool:
        """Whether Pillow shows something else, or nothing, and this module what is right."""
        if self.compression not in _OF_BYTES or self.photometric not in _COLOURS:
            return False
        depth = self.bits[0]
        grey = self.photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO)
        return (
            self.planes
            or depth not in ((8, 16) if self.colours > 1 else (1, 2, 4, 8, 16))
            or (self.photometric == _CMYK and self.samples > self.colours)
            or (self.photometric == _OF_PALETTE and (depth > 8 or self.narrow_palette))
            or (grey and self.samples > 1)
            or (grey and self.reversed_bits and depth >= 8)
            or (self.photometric == _WHITE_IS_ZERO and depth == 16)
        )

    def refusal(self) -> str | None:
        """Why such a file is not read, behind "is a TIFF file"."""
        depth = max(self.bits)
        if self.format not in (0, 1, 4):
            kind = {2: "signed", 3: "floating-point"}.get(self.format, "complex")
            return (
                f"of {kind} samples, which have no agreed white; convert it to unsigned ones of 8 or 16 bits"
            )
        if depth > 16:
            return f"of {depth}-bit samples; convert it to 8 or 16 bits"
        if self.misread and (len(set(self.bits)) > 1 or len(self.bits) != self.samples):
            return f"of samples of {', '.join(map(str, self.bits))} bits; convert it to 8 or 16 bits"
        if self.misread and self.samples < self.colours:
            return f"of {self.samples} samples where its colours are {self.colours}"
        return None


class SampledTiff(ImageFile.ImageFile):
    """A page whose samples are read here. As Pillow's own it is upright once it is loaded; RGB, on white."""

    format = "TIFF"

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        super().__init__(BytesIO())

    def _open(self) -> None:
        layout = self._layout
        self._turn = layout.page.number(_ORIENTATION, 1)
        size = layout.width, layout.height
        self._size = (size[1], size[0]) if 5 <= self._turn <= 8 else size
        self._mode = "RGB"
        self.tile = []

    def load(self) -> Any:
        """Read the pixels; raises ``ValueError`` and ``OSError``."""
        if self._im is None:
            image = Image.fromarray(_on_white(self._layout))
            if self._turn in UPRIGHT:
                image = image.transpose(UPRIGHT[self._turn])
            self.im = image.im
        return Image.Image.load(self)


UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture of an orientation as EXIF and TIFF have it, 2 to 8."""


def _on_white(layout: _Layout) -> Bytes:
    """uint8 ``[height, width, 3]``."""
    depth, colours = layout.bits[0], layout.colours
    values = _samples(layout)
    if layout.photometric == _OF_PALETTE:
        table = np.asarray(layout.page.numbers(_PALETTE), np.uint16)
        if len(table) != 3 << depth:
            raise ValueError(f"a palette of {len(table)} values for {depth} bits")
        shift = 0 if layout.narrow_palette else 8
        shown = (table.reshape(3, -1).T >> shift).astype(np.uint8)[values[..., 0]]
    else:
        shown = _eight(values[..., :colours], depth)
        if layout.photometric == _WHITE_IS_ZERO:
            shown = 255 - shown
        if layout.photometric == _CMYK:
            cmyk = Image.fromarray(np.ascontiguousarray(shown), "CMYK")
            shown = np.asarray(cmyk.convert("RGB"))
        if colours == 1:
            shown = np.repeat(shown, 3, axis=2)
    if layout.samples == colours:
        return np.ascontiguousarray(shown)
    # Without a word of what it is, one that follows the colours is taken for alpha, as Pillow does.
    meaning = layout.extra[0] if layout.extra else _UNASSOCIATED
    if meaning not in (_ASSOCIATED, _UNASSOCIATED):
        return np.ascontiguousarray(shown)
    alpha = _eight(values[..., colours : colours + 1], depth)
    if meaning == _ASSOCIATED:
        over: Bytes = np.minimum(shown + (255 - alpha.astype(np.uint16)), 255).astype(np.uint8)
        return over
    # Wide enough for 255 x 255, and rounded as Pillow rounds.
    total = shown * alpha.astype(np.uint32) + 255 * (255 - alpha.astype(np.uint32)) + 128
    return ((total + (total >> 8)) >> 8).astype(np.uint8)


def _eight(values: Samples, depth: int) -> Bytes:
    if depth >= 8:
        return (values >> (depth - 8)).astype(np.uint8)
    return (values * (255 // ((1 << depth) - 1))).astype(np.uint8)


def _samples(layout: _Layout) -> Samples:
    """uint16 ``[height, width, samples]``."""
    page, height, width = layout.page, layout.height, layout.width
    tiled = _TILES in page.entries
    places = page.numbers(_TILES if tiled else _STRIPS)
    sizes = page.numbers(_TILE_BYTES if tiled else _STRIP_BYTES)
    layers = layout.samples if layout.planes else 1
    together = 1 if layout.planes else layout.samples
    across = page.number(_TILE_WIDTH, 0) if tiled else width
    rows = page.number(_TILE_HEIGHT, 0) if tiled else min(page.number(_STRIP_ROWS, height), height)
    predictor = page.number(_PREDICTOR, 1)
    if not across or not rows or predictor not in (1, 2):
        raise ValueError(f"parts of {across} x {rows} pixels with predictor {predictor}")
    columns = -(-width // across)
    count = columns * -(-height // rows)
    if len(places) != count * layers or len(sizes) != len(places):
        raise ValueError(f"{len(places)} parts where there should be {count * layers}")
    found = np.empty((height, width, layout.samples), np.uint16)
    for layer in range(layers):
        own = slice(layer * count, (layer + 1) * count)
        # Tiles are whole, and lie one below the other; of strips the last one is shorter.
        lines = count * rows if tiled else height
        unpacked = _unpacked(layout, places[own], sizes[own], across * together, rows, lines)
        values: Samples = unpacked.reshape(lines, across, together)
        if predictor == 2:
            values = np.add.accumulate(values, axis=1, dtype=np.uint16)
            values &= np.uint16((1 << layout.bits[0]) - 1)
        into = found[..., layer : layer + 1] if layout.planes else found
        if not tiled:
            into[...] = values
            continue
        for index in range(count):
            top, left = index // columns * rows, index % columns * across
            part = values[index * rows : (index + 1) * rows]
            into[top : top + rows, left : left + across] = part[: height - top, : width - left]
    return found


def _unpacked(
    layout: _Layout, places: Sequence[int], sizes: Sequence[int], across: int, rows: int, lines: int
) -> Samples:
    """uint16 ``[lines, across]``, of a file that has the same parts as 8-bit grey."""
    page, depth = layout.page, layout.bits[0]
    nbytes = -(-across * depth // 8)
    order = page.order
    entries = [
        (_WIDTH, 4, (nbytes,)),
        (_HEIGHT, 4, (lines,)),
        (_BITS, 3, (8,)),
        (_COMPRESSION, 3, (layout.compression,)),
        (_PHOTOMETRIC, 3, (_BLACK_IS_ZERO,)),
        (_FILL_ORDER, 3, (2 if layout.reversed_bits else 1,)),
        (_STRIPS, 4, tuple(places)),
        (_STRIP_ROWS, 4, (rows,)),
        (_STRIP_BYTES, 4, tuple(sizes)),
    ]
    body = page.data[8:] + bytes(len(page.data) % 2)
    behind = bytearray()
    begin = len(body) + 8 + 2 + 12 * len(entries) + 4
    table = struct.pack(f"{order}H", len(entries))
    for tag, kind, values in entries:
        packed = struct.pack(f"{order}{len(values)}{_NUMBERS[kind]}", *values)
        if len(packed) > 4:
            place = begin + len(behind)
            behind += packed
            packed = struct.pack(f"{order}I", place)
        table += struct.pack(f"{order}HHI4s", tag, kind, len(values), packed)
    file = b"".join((_headed(page, len(body) + 8), body, table, bytes(4), behind))
    with Image.open(BytesIO(file), formats=("TIFF",)) as image:
        stored = np.asarray(image)
    if stored.shape != (lines, nbytes):
        raise ValueError("its size is ambiguous")
    if depth == 16:
        return stored.view(f"{order}u2").astype(np.uint16)
    if depth == 8:
        return stored.astype(np.uint16)
    found = np.empty((lines, across), np.uint16)
    weights = 1 << np.arange(depth - 1, -1, -1, dtype=np.uint16)
    for top in range(0, lines, _LINES):
        bits = np.unpackbits(stored[top : top + _LINES], axis=1, count=across * depth)
        found[top : top + _LINES] = bits.reshape(-1, across, depth).astype(np.uint16) @ weights
    return found
