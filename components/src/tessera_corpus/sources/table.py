"""Tables: Parquet files and Lance tables, with named columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.errors import ConfigError
from tessera.extras import missing
from tessera_corpus.item import Failure, Row, file_of
from tessera_corpus.position import Position
from tessera_corpus.shard import Shard
from tessera_corpus.sources import cells
from tessera_corpus.sources.ahead import Work, ahead
from tessera_corpus.sources.lines import made_of
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.settings import Columns

# Rows that are read at a time: images of a megabyte each are to stay below what waits elsewhere.
_BATCH_ROWS: Final = 64


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows of a file of Parquet, or of a Lance table, by their columns.

    An image is a file's bytes, what names it, or a struct of ``bytes`` and ``path`` as ``datasets`` writes
    them. A row without an id has FILE:ROW, from 0. Rows are read as they are needed.
    """

    path: Path
    columns: Columns
    media: Media
    shard: Shard
    _read: int = 0
    _most: int = 0

    def position(self) -> Position:
        return Position(read=self._read, most=self._most)

    def gives(self, id: str, place: str, page: int | None) -> bool:
        name, _, number = place.rpartition(":")
        return name == str(self.path) and number.isdecimal() and self.shard.holds(file_of(id, page))

    def passed_over(self) -> Mapping[str, int]:
        return {}

    def rows(self) -> Iterator[Row]:
        """Raises ``ConfigError`` where it cannot be read, or has neither texts nor images."""
        yield from ahead(self._works())

    def at(self, number: int) -> Sequence[Row]:
        """One row, by its number from 0; none behind the end. Raises ``ConfigError`` as ``rows`` does."""
        names, _ = self._opened()
        if number >= self._most:
            return []
        columns = sorted(set(names.values()))
        try:
            if self.path.suffix == ".lance":
                import lance

                found = lance.dataset(str(self.path)).take([number], columns=columns)
            else:
                import pyarrow.dataset

                found = pyarrow.dataset.dataset(self.path, format="parquet").take([number], columns=columns)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: {error}") from None
        return [
            row
            for values in cells.rows_of(found)
            for row in self._rows(self._id_of(values, names, number), values, names, number)
        ]

    def _id_of(self, values: Mapping[str, Any], names: Mapping[str, str], number: int) -> str:
        return cells.id_of(values.get(names.get("id", ""))) or f"{self.path}:{number}"

    def _works(self) -> Iterator[Work]:
        names, batches = self._opened()
        number = 0
        try:
            for batch in batches:
                for values in cells.rows_of(batch):
                    self._read += 1
                    id = self._id_of(values, names, number)
                    number += 1
                    if self.shard.holds(id):
                        yield self._work(id, values, names, number - 1)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _work(self, id: str, values: Mapping[str, Any], names: Mapping[str, str], number: int) -> Work:
        # Bytes are there; what is named has to be read.
        if isinstance(values.get(names.get("image", "")), str | dict):
            return lambda: self._rows(id, values, names, number)
        return self._rows(id, values, names, number)

    def _rows(self, id: str, values: Mapping[str, Any], names: Mapping[str, str], number: int) -> list[Row]:
        source = f"{self.path}:{number}"

        def failed(key: str, reason: str) -> list[Row]:
            said = f"{names[key]}: {reason}" if key else reason
            return [Failure(id=id, source=source, page=page, reason=said)]

        page: int | None = None
        for key in ("id", "text", "image"):
            if isinstance(bad := values.get(names.get(key, "")), cells.Unreadable):
                return failed(key, bad.reason)
        try:
            page = cells.page_of(values.get(names.get("page", "")))
        except ValueError as error:
            return failed("page", str(error))
        text, image = cells.text_of(values.get(names.get("text", ""))), values.get(names.get("image", ""))
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(text, cells.Unreadable):
            return failed("text", text.reason)
        if text is not None and not isinstance(text, str):
            return failed("text", "expected a text")
        if image is not None and not isinstance(image, str | bytes):
            return failed("image", "expected bytes, a path or a URL")
        if not image and not (text or "").strip():
            return failed("", "neither text nor image")
        return made_of(id, source, text or "", image or "", self.media, page)

    def _opened(self) -> tuple[dict[str, str], Iterator[Any]]:
        """The columns that are there, by what they hold, and the batches of rows."""
        if self.path.suffix == ".lance":
            return self._lance()
        try:
            import pyarrow.parquet
        except ImportError:
            raise missing("reading tables", "pyarrow", extra="corpus") from None
        try:
            file = pyarrow.parquet.ParquetFile(self.path)
            self._most = file.metadata.num_rows
            names = self._named(file.schema_arrow.names)
            return names, file.iter_batches(_BATCH_ROWS, columns=sorted(set(names.values())))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _lance(self) -> tuple[dict[str, str], Iterator[Any]]:
        try:
            import lance
        except ImportError:
            raise missing("a Lance table", "pylance", extra="lance") from None
        try:
            table = lance.dataset(str(self.path))
            self._most = table.count_rows()
            names = self._named(table.schema.names)
            columns = sorted(set(names.values()))
            return names, table.to_batches(columns=columns, batch_size=_BATCH_ROWS, scan_in_order=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _named(self, there: Sequence[str]) -> dict[str, str]:
        wanted = {key: getattr(self.columns, key) for key in ("id", "text", "image", "page")}
        names = {key: name for key, name in wanted.items() if name in there}
        if "text" not in names and "image" not in names:
            raise ConfigError(
                f"{self.path}: has neither a column {wanted['text']!r} nor {wanted['image']!r}: there are "
                f"{', '.join(there)}; --text-column and --image-column name others"
            )
        return names
