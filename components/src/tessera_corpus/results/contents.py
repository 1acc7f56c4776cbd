"""What an output's rows were made of, read again from where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from tessera.errors import TesseraError
from tessera_corpus.documents import Documents, DocumentSettings
from tessera_corpus.item import Document, Failure, Item, Origin
from tessera_corpus.pdf import PictureFormat
from tessera_corpus.sources.choice import read_again
from tessera_corpus.sources.folder import FILES
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.settings import ReadSettings
from tessera_corpus.sources.tables import LINES, TABLES

_GONE: Final = "it is not there any more"


class Contents:
    """A context manager, which has processes for pages of PDF files from the first one on."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._media = Media(settings.root, settings.media, settings.max_bytes)
        self._documents: Documents | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._media.close()
        if self._documents is not None:
            self._documents.close()

    def read(self, place: Origin) -> Item | Failure:
        """What is at the place now, a page as its picture; a failure says why there is nothing."""
        try:
            for row in self._rows(place):
                # What is wrong with another page of the file is nothing of this one's.
                if row.id == place.id or (isinstance(row, Failure) and row.page in (None, place.page)):
                    return row
        except TesseraError as error:
            return place.failed(error.message)
        return place.failed(_GONE)

    def there(self, place: Origin, since: float) -> bool | None:
        """Whether what was embedded is at a place, as whatever it may have become; None: nobody knows.

        ``since`` is the time of the last run: what a file had then it has if it did not change after that.
        """
        path = _file_of(place)
        if path is None:
            return None
        try:
            changed = path.stat().st_mtime > since
        except OSError:
            return False
        if not changed:
            return True
        found = self.read(place)
        return not (isinstance(found, Failure) and found.reason == _GONE)

    def _rows(self, place: Origin) -> Iterator[Item | Failure]:
        file_id = place.id.removesuffix(f"#page={place.page}")
        for row in read_again(place.source, file_id, self._settings, self._media):
            if isinstance(row, Document):
                if self._documents is None:
                    settings = DocumentSettings(processes=1)
                    self._documents = Documents(settings, PictureFormat.PNG)
                yield from self._documents.pages(iter([row]), lambda id, _: id != place.id)
            else:
                yield row


def _file_of(place: Origin) -> Path | None:
    """The file that a place is in, or is; None for standard input."""
    name, _, number = place.source.rpartition(":")
    path = Path(name if number.isdecimal() and Path(name).suffix.lower() in LINES | TABLES else place.source)
    return path if path.suffix.lower() in FILES | LINES | TABLES else None
