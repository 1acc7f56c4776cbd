"""Pages of PDF files that come out blank, though they are not."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any, Final

from tessera.sandbox.memory import Memory
from tessera_corpus import objects

_WHITE: Final = 255
# Looked at together.
_ROWS: Final = 64


def is_blank(pixels: Memory, width: int, height: int, stride: int) -> bool:
    """Whether all of ``height`` rows of 8-bit BGR are white, each of ``stride`` bytes and ``width`` pixels.

    A page with ink is known by a few of its rows, mostly by those in the middle.
    """
    rows = pixels[: stride * height].reshape(height, stride)[:, : 3 * width]
    begins = list(range(0, height, _ROWS))
    middle = len(begins) // 2
    return all(rows[begin : begin + _ROWS].min() == _WHITE for begin in begins[middle:] + begins[:middle])


def lost(page: Any, raw: Any) -> str | None:
    """Say what of a blank page is to be seen, and was not drawn.

    That is not what may well be unseen: texts without a letter, or drawn to be found alone; what is white or
    beyond the page's edges; pictures that could be read; and what ``layers.hide`` has found to be hidden.
    """
    found: Counter[str] = Counter()
    textpage = page.get_textpage()
    try:
        for kind, drawn, around in objects.each(page, raw):
            # Forms have places of their own.
            if _is_active(drawn, raw) and (around or _is_within(page, drawn, raw)):
                if kind == raw.FPDF_PAGEOBJ_TEXT:
                    found["text"] += _is_seen(drawn, raw) and _has_letters(drawn, textpage, raw)
                elif kind == raw.FPDF_PAGEOBJ_PATH:
                    found["path"] += _is_painted(drawn, raw)
                elif kind == raw.FPDF_PAGEOBJ_IMAGE:
                    found["picture"] += not _is_read(drawn, raw)
                elif kind == raw.FPDF_PAGEOBJ_SHADING:
                    found["shading"] += 1
    finally:
        textpage.close()
    what = [f"{count} {name}{'s' * (count > 1)}" for name, count in found.items() if count]
    return f"blank, though it has {' and '.join(what)}" if what else None


def _is_active(drawn: Any, raw: Any) -> bool:
    active = ctypes.c_int()
    raw.FPDFPageObj_GetIsActive(drawn, active)
    return bool(active.value)


def _is_within(page: Any, drawn: Any, raw: Any) -> bool:
    """Whether any of it is within the page's edges."""
    left, bottom, right, top = page.get_bbox()
    begins, low, ends, high = edges = [ctypes.c_float() for _ in range(4)]
    raw.FPDFPageObj_GetBounds(drawn, *edges)
    return bool(begins.value < right and ends.value > left and low.value < top and high.value > bottom)


def _is_seen(text: Any, raw: Any) -> bool:
    mode = raw.FPDFTextObj_GetTextRenderMode(text)
    unseen = (raw.FPDF_TEXTRENDERMODE_INVISIBLE, raw.FPDF_TEXTRENDERMODE_CLIP)
    return mode not in unseen and _is_coloured(text, raw.FPDFPageObj_GetFillColor)


def _has_letters(text: Any, textpage: Any, raw: Any) -> bool:
    nbytes = raw.FPDFTextObj_GetText(text, textpage, None, 0)
    units = (ctypes.c_ushort * (nbytes // 2))()
    raw.FPDFTextObj_GetText(text, textpage, units, nbytes)
    return bool(bytes(units).decode("utf-16-le", "ignore").strip("\0 \t\r\n\u00a0"))


def _is_painted(path: Any, raw: Any) -> bool:
    filled, stroked = ctypes.c_int(), ctypes.c_int()
    raw.FPDFPath_GetDrawMode(path, filled, stroked)
    return bool(filled.value and _is_coloured(path, raw.FPDFPageObj_GetFillColor)) or bool(
        stroked.value and _is_coloured(path, raw.FPDFPageObj_GetStrokeColor)
    )


def _is_coloured(drawn: Any, get: Any) -> bool:
    """Whether it is neither white nor transparent."""
    red, green, blue, alpha = colour = [ctypes.c_uint() for _ in range(4)]
    known = get(drawn, *colour)
    return not known or (alpha.value > 0 and not red.value == green.value == blue.value == _WHITE)


def _is_read(picture: Any, raw: Any) -> bool:
    bitmap = raw.FPDFImageObj_GetBitmap(picture)
    if bitmap:
        raw.FPDFBitmap_Destroy(bitmap)
    return bool(bitmap)
