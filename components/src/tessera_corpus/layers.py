"""Layers of PDF pages: text that the picture of the page does not show is not its text."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

_MAX_DEPTH: Final = 16
# Pixels of the longer side of the picture that tells whether anything of a layer is shown.
_SIDE: Final = 500


def hide(page: Any, raw: Any) -> bool:
    """Make what is on hidden layers no part of the page; False where it has none.

    PDFium's functions for text know no layers, and it has none that tells which are hidden, but it draws
    none of these: each layer is drawn alone, and is hidden where nothing appears.
    """
    layers: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for key, drawn in each_drawn(page, raw):
        layers[key].append(drawn)
    optional = [key for key in layers if key]
    if not optional:
        return False
    everything = [drawn for some in layers.values() for drawn in some]
    for drawn in everything:
        raw.FPDFPageObj_SetIsActive(drawn, False)
    shown = {key for key in optional if _is_shown(page, layers[key], raw)}
    for key, some in layers.items():
        for drawn in some:
            raw.FPDFPageObj_SetIsActive(drawn, not key or key in shown)
    return len(shown) < len(optional)


def each_drawn(page: Any, raw: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """What is drawn, each with the marks of layers and the forms that it is in."""

    def within(container: Any, count: Any, get: Any, key: tuple[int, ...], depth: int) -> Any:
        for index in range(max(0, count(container))):
            drawn = get(container, index)
            own = key + tuple(_marks(drawn, raw))
            if raw.FPDFPageObj_GetType(drawn) == raw.FPDF_PAGEOBJ_FORM and depth < _MAX_DEPTH:
                own += (_address(drawn),)
                yield from within(
                    drawn, raw.FPDFFormObj_CountObjects, raw.FPDFFormObj_GetObject, own, depth + 1
                )
            else:
                yield own, drawn

    yield from within(page, raw.FPDFPage_CountObjects, raw.FPDFPage_GetObject, (), 0)


def _marks(drawn: Any, raw: Any) -> Iterator[int]:
    name = (ctypes.c_ushort * 4)()
    nbytes = ctypes.c_ulong()
    for index in range(max(0, raw.FPDFPageObj_CountMarks(drawn))):
        mark = raw.FPDFPageObj_GetMark(drawn, index)
        raw.FPDFPageObjMark_GetName(mark, name, ctypes.sizeof(name), nbytes)
        if bytes(name)[: nbytes.value] == "OC\0".encode("utf-16-le"):
            yield _address(mark)


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _is_shown(page: Any, some: list[Any], raw: Any) -> bool:
    """Whether anything appears where these alone are drawn."""
    import pypdfium2

    # The unseen text of a scanned page may be on a layer that is shown.
    unseen = [
        drawn
        for drawn in some
        if raw.FPDFPageObj_GetType(drawn) == raw.FPDF_PAGEOBJ_TEXT
        and raw.FPDFTextObj_GetTextRenderMode(drawn) == raw.FPDF_TEXTRENDERMODE_INVISIBLE
    ]
    for drawn in unseen:
        raw.FPDFTextObj_SetTextRenderMode(drawn, raw.FPDF_TEXTRENDERMODE_FILL)
    for drawn in some:
        raw.FPDFPageObj_SetIsActive(drawn, True)
    width, height = page.get_size()
    scale = _SIDE / max(width, height, 1.0)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    bitmap = pypdfium2.PdfBitmap.new_native(*size, raw.FPDFBitmap_BGRA)
    bitmap.fill_rect((0, 0, 0, 0), 0, 0, *size)
    raw.FPDF_RenderPageBitmap(bitmap, page, 0, 0, *size, 0, 0)
    shown = any(bytes(bitmap.buffer)[3::4])
    bitmap.close()
    for drawn in some:
        raw.FPDFPageObj_SetIsActive(drawn, False)
    for drawn in unseen:
        raw.FPDFTextObj_SetTextRenderMode(drawn, raw.FPDF_TEXTRENDERMODE_INVISIBLE)
    return shown
