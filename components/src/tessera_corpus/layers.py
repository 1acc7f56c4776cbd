"""Layers of PDF pages: text that the picture of the page does not show is not its text."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from tessera_corpus import objects

# Pixels of the longer side of the picture that tells whether anything of a layer is shown.
_SIDE: Final = 500


def hide(page: Any, raw: Any) -> bool:
    """Make what is on hidden layers no part of the page; False where it has none.

    PDFium's functions for text know no layers, and it has none that tells which are hidden, but it draws
    none of these: each layer is drawn alone, and is hidden where nothing appears.
    """
    layers: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    marked = _Marked(raw)
    for _, drawn, around in objects.each(page, raw):
        layers[marked.key(drawn, around)].append(drawn)
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


class _Marked:
    """Tells what is on the same layers: what has the same marks of them, and is within the same forms."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._of_forms: dict[int, tuple[int, ...]] = {}

    def key(self, drawn: Any, forms: tuple[Any, ...]) -> tuple[int, ...]:
        """Empty where nothing can hide it."""
        found: tuple[int, ...] = ()
        for form in forms:
            address = _address(form)
            if address not in self._of_forms:
                self._of_forms[address] = (*_marks(form, self._raw), address)
            found += self._of_forms[address]
        return (*found, *_marks(drawn, self._raw))


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
