"""Tables: Parquet files and Lance tables, with named columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec

from tessera.errors import ConfigError
from tessera_corpus.item import Failure, Row, file_of
from tessera_corpus.shard import Shard
from tessera_corpus.sources.ahead import Work, ahead
from tessera_corpus.sources.counted import Counted
from tessera_corpus.sources.lance import LanceTable
from tessera_corpus.sources.lines import made_of
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.parquet import Unread, Values
from tessera_corpus.sources.settings import Columns


@dataclass(slots=True, kw_only=True)
class Table(Counted):
    """Rows of a file of Parquet, or of a Lance table, by their columns.

    An image is a file's bytes, what names it, or a struct of ``bytes`` and ``path`` as ``datasets`` writes
    them; the images of a list are one input. A row without an id has FILE:ROW, from 0. Rows are read as they
    are needed, those of Parquet by the confined process of ``media``, those of Lance by a process of their
    own. A table that is damaged is a failure of its own, behind the rows that could be read, and so is one of
    several that has nothing to embed.
    """

    path: Path
    columns: Columns
    media: Media
    shard: Shard
    alone: bool = True

    def gives(self, id: str, place: str, page: int | None) -> bool:
        name, _, number = place.rpartition(":")
        return name == str(self.path) and number.isdecimal() and self.shard.holds(file_of(id, page))

    def rows(self) -> Iterator[Row]:
        """Raises ``ConfigError`` where it alone has neither texts nor images, or a package is missing."""
        yield from ahead(self._works())

    def at(self, number: int) -> Sequence[Row]:
        """Return one row, by its number from 0; none behind the end.

        Raises ``ConfigError`` as ``rows`` does, and where it cannot be read.
        """
        try:
            with self._opened() as table:
                self._check(table.names)
                if number >= table.count:
                    return []
                (values,) = table.rows(number, 1)
                return self._rows(self._id_of(values, number), values, number)
        except Unread as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _id_of(self, values: Values, number: int) -> str:
        return f"{self.path}:{number}" if values.id is None else values.id

    def _works(self) -> Iterator[Work]:
        number = 0
        try:
            with self._opened() as table:
                self._most = table.count
                if not self.alone and (lack := self._lack(table.names)) is not None:
                    raise Unread(lack)
                self._check(table.names)
                for values in chain.from_iterable(table.batches()):
                    self._read += 1
                    id = self._id_of(values, number)
                    number += 1
                    if self.shard.holds(id):
                        yield self._work(id, values, number - 1)
        except Unread as error:
            self._read = self._most = max(self._most, 1)
            id = str(self.path)
            if self.shard.holds(id):
                said = f"{error}; rows from {number} on are not read" if number else str(error)
                yield [Failure(id=id, source=id, reason=said)]

    def _work(self, id: str, values: Values, number: int) -> Work:
        # Bytes are there; what is named has to be read.
        if any(isinstance(image, str) for image in values.images):
            return lambda: self._rows(id, values, number)
        return self._rows(id, values, number)

    def _rows(self, id: str, values: Values, number: int) -> list[Row]:
        source = f"{self.path}:{number}"
        text, images, page = values.text, values.images, values.page
        if values.wrong:
            return [Failure(id=id, source=source, page=page, reason=values.wrong)]
        if not images and not (text or "").strip():
            return [Failure(id=id, source=source, page=page, reason="neither text nor image")]
        return made_of(id, source, text or "", images, self.media, page)

    @contextmanager
    def _opened(self) -> Iterator[_Opened]:
        lance = self.path.suffix.lower() == ".lance"
        with closing(
            LanceTable(self.path, self.columns) if lance else self.media.tables(self.columns).open(self.path)
        ) as table:
            yield table

    def _check(self, there: Sequence[str]) -> None:
        if (lack := self._lack(there)) is not None:
            raise ConfigError(f"{self.path}: {lack}")

    def _lack(self, there: Sequence[str]) -> str | None:
        wanted = msgspec.structs.asdict(self.columns)
        twice = [name for name in wanted.values() if name in there and there.count(name) > 1]
        if twice:
            return f"has {there.count(twice[0])} columns {twice[0]!r}"
        if wanted["text"] in there or wanted["image"] in there:
            return None
        return (
            f"has neither a column {wanted['text']!r} nor {wanted['image']!r}: there are "
            f"{', '.join(there)}; --text-column and --image-column name others"
        )


class _Opened(Protocol):
    """A table that is being read. Its methods raise ``Unread``."""

    @property
    def count(self) -> int: ...

    @property
    def names(self) -> Sequence[str]: ...

    def batches(self) -> Iterator[Sequence[Values]]: ...

    def rows(self, first: int, most: int) -> Sequence[Values]: ...
