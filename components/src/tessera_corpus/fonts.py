"""Fonts for the letters of PDF files that have none of their own.

PDFium brings fonts for Latin-1 alone. The extra ``fonts`` brings FiraGO (Latin, Cyrillic, Greek, Hebrew and
Arabic) and Noto Sans CJK (Chinese, Japanese and Korean), both under the SIL Open Font License 1.1. They are
read into memory before the process is confined, and PDFium asks for them by the callbacks of
``fpdf_sysfontinfo.h``.
"""

from __future__ import annotations

import ctypes
import io
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tessera.extras import absent
from tessera_corpus import objects

_PACKAGES: Final = ("pymupdf_fonts", "cvttf_NotoSansCJK_Regular", "fontTools")

# Of ``fpdf_sysfontinfo.h``: Japanese, Korean, simplified and traditional Chinese.
_EAST_ASIAN: Final = (128, 129, 134, 136)
# Latin-1, any, and that of fonts of pictures.
_NO_SCRIPT: Final = frozenset({0, 1, 2})

# What PDFium's own fonts draw: Windows-1252, and what Adobe's standard Latin set has besides.
_OWN: Final = frozenset(bytes(range(32, 256)).decode("cp1252", "ignore")) | frozenset(
    "\u0131\u02c6\u02c7\u02d8\u02d9\u02da\u02db\u02dc\u02dd\u2212\u2044\ufb01\ufb02"
)
# Characters of which one is looked at.
_SAMPLED: Final = 8
# They are drawn by fonts of PDFium's own, whose letters Unicode has elsewhere.
_PICTORIAL: Final = ("Symbol", "ZapfDingbats")


WORDS: Final = frozenset(
    {b"/Differences", b"/Type0", b"/ToUnicode", b"/MacRomanEncoding", b"/MacExpertEncoding"}
)
"""A file with none of them has no letters that PDFium's own fonts lack, but in fonts of another script: four
of five files whose fonts are not embedded are such ones."""


class _Font:
    """An OpenType file in memory."""

    def __init__(self, name: str, data: bytes) -> None:
        from fontTools.ttLib import TTFont

        self.name = name
        self.data = data
        with TTFont(io.BytesIO(data), lazy=True) as font:
            self.letters = frozenset(map(chr, font.getBestCmap()))

    @cached_property
    def _tables(self) -> dict[int, tuple[int, int]]:
        """Offset and length by tag, https://learn.microsoft.com/typography/opentype/spec/otff."""
        (count,) = struct.unpack_from(">H", self.data, 4)
        entries = (struct.unpack_from(">IIII", self.data, 12 + 16 * index) for index in range(count))
        return {tag: (offset, length) for tag, _, offset, length in entries}

    def table(self, tag: int) -> bytes:
        """One table, empty where there is none; the whole file for 0."""
        if not tag:
            return self.data
        offset, length = self._tables.get(tag, (0, 0))
        return self.data[offset : offset + length]


class Fonts:
    """Fonts that PDFium asks for where a file has none; one for a process, before its first file.

    Without ``lent`` it gets none, and draws by its own what they have: ordinary pages look as they do
    without the extra, and take as long.
    """

    def __init__(self, raw: Any) -> None:
        # Looked for now: a confined process that looks for a module ends.
        self.installed = not absent(*_PACKAGES)
        self._fonts = list(_installed()) if self.installed else []
        self._raw = raw
        self._first: _Font | None = None
        self._used: set[str] = set()
        self.charsets: set[int] = set()
        """Of the fonts that PDFium looked for since this was last cleared."""
        # Kept: PDFium calls them as long as it runs.
        self._info = self._callbacks()
        raw.FPDF_SetSystemFontInfo(self._info)

    @contextmanager
    def lent(self, lacking: Counter[str]) -> Iterator[None]:
        """Give PDFium fonts, above all the one that has the most of these letters."""
        self._first = max(
            self._fonts,
            key=lambda font: sum(count for letter, count in lacking.items() if letter in font.letters),
            default=None,
        )
        self._used.clear()
        try:
            yield
        finally:
            self._first = None

    @property
    def asked_for_script(self) -> bool:
        """Whether PDFium looked for a font of another script than Latin."""
        return not self.charsets <= _NO_SCRIPT

    def have_any(self, lacking: Counter[str]) -> bool:
        """Whether any of these letters could be drawn."""
        return any(letter in font.letters for letter in lacking for font in self._fonts)

    def still_lacking(self, lacking: Counter[str]) -> Counter[str]:
        """What none of the fonts has that PDFium took while they were lent."""
        used = [font.letters for font in self._fonts if font.name in self._used]
        return Counter(
            {letter: count for letter, count in lacking.items() if not any(letter in own for own in used)}
        )

    def _callbacks(self) -> Any:
        kind = self._raw.FPDF_SYSFONTINFO
        types = dict(kind._fields_)
        info = kind(version=1)
        calls: dict[str, Callable[..., Any]] = {
            "Release": lambda info: None,
            "EnumFonts": lambda info, mapper: None,
            "MapFont": self._map,
            "GetFont": lambda info, face: None,
            "GetFontData": self._data,
            "GetFaceName": self._name,
            "GetFontCharset": lambda info, handle: 1,
            "DeleteFont": lambda info, handle: None,
        }
        for name, call in calls.items():
            setattr(info, name, types[name](call))
        return info

    def _map(
        self, info: Any, weight: int, italic: int, charset: int, pitch: int, face: Any, exact: Any
    ) -> Any:
        """A handle: the font's place, from 1."""
        self.charsets.add(charset)
        if self._first is None:
            return None
        font = self._fonts[-1] if charset in _EAST_ASIAN else self._first
        self._used.add(font.name)
        return self._fonts.index(font) + 1

    def _data(self, info: Any, handle: int, tag: int, buffer: Any, size: int) -> int:
        return _copied(self._fonts[handle - 1].table(tag), buffer, size)

    def _name(self, info: Any, handle: int, buffer: Any, size: int) -> int:
        # PDFium keeps faces by their names.
        return _copied(self._fonts[handle - 1].name.encode() + b"\0", buffer, size)


def _copied(data: bytes, buffer: Any, size: int) -> int:
    if buffer and size >= len(data):
        ctypes.memmove(buffer, data, len(data))
    return len(data)


def _installed() -> Iterator[_Font]:
    import cvttf_NotoSansCJK_Regular
    from pymupdf_fonts import FiraGO_Regular

    yield _Font("FiraGO", FiraGO_Regular.fontbuffer)
    yield _Font("Noto Sans CJK", Path(cvttf_NotoSansCJK_Regular.get_TTF_path()).read_bytes())


def lacking(page: Any, raw: Any, *, most: int) -> Counter[str]:
    """Count the letters of a page that PDFium's own fonts lack, of fonts that are not embedded.

    U+FFFD stands for those of which the file does not say what they are. None are counted where there are
    more than ``most`` characters.
    """
    substituted: dict[int, bool] = {}
    others = []
    some = []
    for kind, drawn, _ in objects.each(page, raw):
        if kind != raw.FPDF_PAGEOBJ_TEXT or not (font := raw.FPDFTextObj_GetFont(drawn)):
            continue
        address = ctypes.cast(font, ctypes.c_void_p).value or 0
        if address not in substituted:
            substituted[address] = _is_substituted(font, raw)
        # The text of a scanned page is laid over its picture, unseen.
        if substituted[address] and (
            raw.FPDFTextObj_GetTextRenderMode(drawn) != raw.FPDF_TEXTRENDERMODE_INVISIBLE
        ):
            some.append(drawn)
        else:
            others.append(drawn)
    if not some:
        return Counter()
    # The other text takes most of the time, which is a fifth of what it takes to draw a page.
    for drawn in others:
        raw.FPDFPageObj_SetIsActive(drawn, False)
    textpage = page.get_textpage()
    try:
        if textpage.count_chars() > most:
            return Counter()
        found = _lacking(textpage, raw)
        # Their codes PDFium does not know at all.
        if unread := sum(_is_unread(drawn, textpage, raw) for drawn in some):
            found["\ufffd"] += unread
        return found
    finally:
        textpage.close()
        for drawn in others:
            raw.FPDFPageObj_SetIsActive(drawn, True)


def _lacking(textpage: Any, raw: Any) -> Counter[str]:
    count = textpage.count_chars()
    handle = textpage.raw

    def is_unknown(index: int) -> bool:
        return bool(
            raw.FPDFText_HasUnicodeMapError(handle, index) == 1
            and raw.FPDFText_IsGenerated(handle, index) != 1
        )

    found: Counter[str] = Counter()
    # What the file does not say may be any character, and is so for whole runs.
    if any(map(is_unknown, range(0, count, _SAMPLED))):
        found["\ufffd"] = sum(map(is_unknown, range(count)))
    text = textpage.get_text_range() if count > 0 else ""
    wanted = frozenset(filter(_is_lacking, set(text)))
    place = 0
    for letter in text if wanted else "":
        if letter in wanted:
            index = raw.FPDFText_GetCharIndexFromTextIndex(handle, place)
            # PDFium takes the code of a letter for a letter where the file does not say.
            if not (found and is_unknown(index)):
                found[letter] += 1
        # In UTF-16.
        place += 1 + (letter > "\uffff")
    return found


def _is_unread(drawn: Any, textpage: Any, raw: Any) -> bool:
    """Whether a text has room on the page, which blanks have not, and no letter."""
    if raw.FPDFTextObj_GetText(drawn, textpage, None, 0) > len("\0".encode("utf-16-le")):
        return False
    left, bottom, right, top = edges = [ctypes.c_float() for _ in range(4)]
    raw.FPDFPageObj_GetBounds(drawn, *edges)
    return bool(right.value > left.value or top.value > bottom.value)


def _is_lacking(letter: str) -> bool:
    # Neither blanks nor marks without a picture of their own.
    return letter not in _OWN and letter.isprintable()


def _is_substituted(font: Any, raw: Any) -> bool:
    if raw.FPDFFont_GetIsEmbedded(font) != 0:
        return False
    name = ctypes.create_string_buffer(64)
    raw.FPDFFont_GetBaseFontName(font, name, len(name))
    return name.value.decode("latin-1") not in _PICTORIAL
