"""What PDF pages are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

# Of forms within forms.
_MAX_DEPTH: Final = 16


def each(page: Any, raw: Any) -> Iterator[tuple[int, Any, tuple[Any, ...]]]:
    """Yield what is drawn: its kind (``FPDF_PAGEOBJ_``), itself, and the forms around it from the outermost.

    A form is not yielded itself, unless it is within too many others.
    """
    kind_of, form = raw.FPDFPageObj_GetType, raw.FPDF_PAGEOBJ_FORM

    def within(container: Any, count: int, get: Any, forms: tuple[Any, ...]) -> Iterator[Any]:
        for index in range(count):
            drawn = get(container, index)
            kind = kind_of(drawn)
            if kind == form and len(forms) < _MAX_DEPTH:
                inner = raw.FPDFFormObj_CountObjects(drawn)
                yield from within(drawn, inner, raw.FPDFFormObj_GetObject, (*forms, drawn))
            else:
                yield kind, drawn, forms

    return within(page.raw, raw.FPDFPage_CountObjects(page), raw.FPDFPage_GetObject, ())
