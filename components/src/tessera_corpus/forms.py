"""Fields of PDF pages: what they say becomes text of the page."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

# ISO 32000-1, 9.4.3 and 8.10.1: operators that show text, or what may have some.
_SHOWS: Final = re.compile(r"\b(?:Tj|TJ|Do)\b|[)>\s]['\"]\s")
_NAME_BYTES: Final = 64


def read(document: Any, index: int, page: Any, raw: Any) -> list[Any]:
    """The page with its fields as content, which has a place among the lines.

    It is the page as it was, where no appearance of an annotation has text: to draw the fields in and open
    the page again takes half as long as to read it. It is two pages, the second of the fields alone, where
    PDFium has given the page resources of its own, and no longer finds those that it had from its parent.
    """
    if not _says(page, raw):
        return [page]
    font, count = _first_font(page, raw), raw.FPDFPage_CountObjects(page)
    page.flatten()
    filled = document[index]
    if _first_font(filled, raw) == font or font is None:
        page.close()
        return [filled]
    for number in range(count):
        raw.FPDFPageObj_SetIsActive(raw.FPDFPage_GetObject(filled, number), False)
    return [page, filled]


def _says(page: Any, raw: Any) -> bool:
    return any(
        _SHOWS.search(_appearance(page, number, raw)) for number in range(raw.FPDFPage_GetAnnotCount(page))
    )


def _appearance(page: Any, number: int, raw: Any) -> str:
    """The operators that draw an annotation in its state."""
    annotation = raw.FPDFPage_GetAnnot(page, number)
    if not annotation:
        return ""
    try:
        mode = raw.FPDF_ANNOT_APPEARANCEMODE_NORMAL
        nbytes = raw.FPDFAnnot_GetAP(annotation, mode, None, 0)
        units = (ctypes.c_ushort * (nbytes // 2))()
        raw.FPDFAnnot_GetAP(annotation, mode, units, nbytes)
        return bytes(units).decode("utf-16-le", "ignore")
    finally:
        raw.FPDFPage_CloseAnnot(annotation)


def _first_font(page: Any, raw: Any) -> bytes | None:
    """The name of the font of the page's first text."""
    for index in range(raw.FPDFPage_CountObjects(page)):
        if font := raw.FPDFTextObj_GetFont(raw.FPDFPage_GetObject(page, index)):
            name = ctypes.create_string_buffer(_NAME_BYTES)
            raw.FPDFFont_GetBaseFontName(font, name, len(name))
            return name.value
    return None
