"""The text of a page, as PDFium has it: within the page's edges, its words in one piece.

``raw`` is ``pypdfium2.raw`` throughout.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

MOST_CHARACTERS: Final = 1_000_000


def read(page: Any, raw: Any) -> str | None:
    """What a page says within its edges; None for more than is allowed."""
    textpage = page.get_textpage()
    try:
        if textpage.count_chars() > MOST_CHARACTERS:
            return None
        text = _within(page, textpage, raw)
    finally:
        textpage.close()
    return _joined(text.replace("\ufffe", _PARTED).replace("\0", ""))[:MOST_CHARACTERS].strip()


# Points, beyond what any page has.
_FAR: Final = 1e9
_LINE_END: Final = "\n".encode("utf-16-le")
_BLANK: Final = " ".encode("utf-16-le")


def _within(page: Any, textpage: Any, pdfium: Any) -> str:
    """The characters whose middle is within the page's edges.

    PDFium's own function for it joins lines, and has vertical ones in disorder.
    """
    left, bottom, right, top = page.get_bbox()
    # A page has 200 of them, and each asked for in a plainer way takes twice as long.
    handle, rectangle = textpage.raw, pdfium.FPDFText_GetRect
    begins, high, ends, low = edges = [ctypes.c_double() for _ in range(4)]
    places = [ctypes.byref(edge) for edge in edges]
    all_of_it = textpage.count_chars()
    units = _units(textpage, all_of_it, pdfium)
    parts: list[bytes] = []

    def take(begin: int, count: int) -> None:
        """Of so many characters from one on: all where no rectangle around some of them crosses an edge,
        none where all lie beyond, and otherwise what is to be taken of each half."""
        inside = outside = False
        for index in range(pdfium.FPDFText_CountRects(textpage, begin, count)):
            rectangle(handle, index, *places)
            if left <= begins.value and ends.value <= right and bottom <= low.value and high.value <= top:
                inside = True
            elif ends.value < left or begins.value > right or high.value < bottom or low.value > top:
                outside = True
            elif count == 1:
                across, up = (begins.value + ends.value) / 2, (low.value + high.value) / 2
                inside = left <= across <= right and bottom <= up <= top
                outside = not inside
            else:
                inside = outside = True
            if inside and outside:
                half = count // 2
                take(begin, half)
                take(begin + half, count - half)
                return
        some = units[2 * begin : 2 * (begin + count)]
        if not outside:
            parts.append(some)
        elif _LINE_END in some:
            # The line ends all the same.
            parts.append(_LINE_END)

    def within(*box: float) -> int:
        """How much text lies within left, top, right and bottom, also in part."""
        return int(pdfium.FPDFText_GetBoundedText(handle, *box, None, 0))

    # Twice this is half of what the rectangles take.
    if within(left, top, right, bottom) == within(-_FAR, _FAR, _FAR, -_FAR):
        parts.append(units)
    else:
        take(0, all_of_it)
    # Lines end with CR LF.
    text = b"".join(parts).decode("utf-16-le", "ignore")
    text = text.replace("\r\n", "\n").replace("\r", " ")
    return text if len(parts) == 1 else re.sub(r"(\s*\n){2,}", "\n", text)


def _units(textpage: Any, count: int, pdfium: Any) -> bytes:
    """The characters of a page in UTF-16, two bytes for each of ``count``.

    PDFium leaves out codes without a meaning, which are blanks above all. Where they are is found by halves:
    86 questions for 12 of 6,123 characters take 0.14 ms, and to ask for each character 2.6.
    """
    handle = textpage.raw
    # And a zero.
    found = (ctypes.c_ushort * (count + 1))()
    length = max(0, pdfium.FPDFText_GetText(handle, 0, count, found) - 1)
    text = bytes(found)[: 2 * length]
    if length == count:
        return text
    units = bytearray(_BLANK * count)

    def put(begin: int, end: int, first: int, last: int) -> None:
        """Of the text from ``begin`` to ``end``, between the characters ``first`` and ``last``."""
        if last - first - 1 == end - begin:
            units[2 * (first + 1) : 2 * last] = text[2 * begin : 2 * end]
        elif begin < end:
            half = (begin + end) // 2
            place = pdfium.FPDFText_GetCharIndexFromTextIndex(handle, half)
            put(begin, half, first, place)
            put(half + 1, end, place, last)
            units[2 * place : 2 * (place + 1)] = text[2 * half : 2 * (half + 1)]

    put(0, length, -1, count)
    return bytes(units)


# What PDFium has for a hyphen at the end of a line, and for the end of that line.
_PARTED: Final = "\x02"
_WORD: Final = re.compile(r"\w*")


def _joined(text: str) -> str:
    """Join words that the end of a line parts: without the hyphen, as poppler has them.

    It stays where it is the word's own: where the page has the word with it elsewhere, before a digit or a
    capital letter after a small one, and after ``self``.
    """
    before, *others = text.split(_PARTED)
    parts = [before]
    for after in others:
        first, second = _begin(before[::-1])[::-1], _begin(after)
        own = (
            first.lower() == "self"
            or second[:1].isdigit()
            or (second[:1].isupper() and not first.isupper())
            or (f"{first}-{second}" in text and f"{first}{second}" not in text)
        )
        parts += ("-" * (own and bool(first and second)), after)
        before = after
    return "".join(parts)


def _begin(text: str) -> str:
    """The word that a text begins with, which may be empty."""
    word = _WORD.match(text)
    return word[0] if word is not None else ""
