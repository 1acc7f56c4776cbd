"""What an output's rows were made of, read again from where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from tessera.errors import TesseraError
from tessera_corpus.documents import Documents, DocumentSettings
from tessera_corpus.item import Document, Failure, Item, Row
from tessera_corpus.pdf import PictureFormat
from tessera_corpus.search import Place
from tessera_corpus.sources.choice import read_again
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.settings import ReadSettings


class Contents:
    """A context manager, which has processes for pages of PDF files from the first one on."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._media = Media(settings.root, settings.media, settings.max_bytes)
        self._documents: Documents | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._media.close()
        if self._documents is not None:
            self._documents.close()

    def read(self, place: Place) -> Item | Failure:
        """What is at the place now, a page as its picture; a failure says why there is nothing."""
        try:
            for row in self._rows(place):
                if isinstance(row, Failure) or row.id == place.id:
                    return row
        except TesseraError as error:
            return _failure(place, error.message)
        return _failure(place, "it is not there any more")

    def _rows(self, place: Place) -> Iterator[Item | Failure]:
        file_id = place.id.removesuffix(f"#page={place.page}")
        for row in read_again(place.source, file_id, self._settings, self._media):
            if isinstance(row, Document):
                if self._documents is None:
                    settings = DocumentSettings(processes=1)
                    self._documents = Documents(settings, PictureFormat.PNG)
                yield from self._documents.pages(_one(row), lambda id, _: id != place.id)
            else:
                yield row


def _one(row: Row) -> Iterator[Row]:
    yield row


def _failure(place: Place, reason: str) -> Failure:
    return Failure(id=place.id, source=place.source, page=place.page, reason=reason)
