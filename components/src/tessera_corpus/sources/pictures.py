"""Picture files as rows: one, or of a TIFF file of several pages one for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from tessera import tiff
from tessera.local.content import ImageFile
from tessera_corpus.item import Failure, Item, Row

_MAX_PAGES: Final = 10_000
# Of all pages together, in files: those of a scanner share nothing, and hostile ones may share all.
_MOST_TIMES: Final = 2


def has_pages(data: bytes) -> bool:
    """Whether a file has several pages."""
    return len(list(islice(tiff.pages(data), 2))) > 1


def picture_rows(id: str, source: str, data: bytes, *, text: str = "", page: int | None = None) -> list[Row]:
    """The rows of one file, with the text that stands beside it and the ``page`` that somebody gave it.

    Pages are ``ID#page=N``, from 1; thumbnails and masks among them do not count.
    """
    found: Sequence[tiff.Directory] = list(tiff.pages(data))
    if len(found) < 2:
        beside = (text,) if text.strip() else ()
        return [Item(id=id, source=source, page=page, parts=(ImageFile(data), *beside))]
    reason = ""
    if text.strip():
        reason = f"a TIFF file of {len(found)} pages, and there is one text beside it"
    elif len(found) > _MAX_PAGES:
        reason = f"{len(found)} pages, the limit is {_MAX_PAGES}"
    if reason:
        return [Failure(id=id, source=source, page=page, reason=reason)]
    rows: list[Row] = []
    left = _MOST_TIMES * len(data)
    for number, directory in enumerate(found, 1):
        name = f"{id}#page={number}"
        try:
            file = tiff.cut(directory)
        except ValueError as error:
            rows.append(Failure(id=name, source=source, page=number, reason=f"a damaged page: {error}"))
            continue
        left -= len(file)
        if left < 0:
            return [Failure(id=id, source=source, reason="its pages are larger together than the file")]
        rows.append(Item(id=name, source=source, page=number, parts=(ImageFile(file),)))
    return rows
