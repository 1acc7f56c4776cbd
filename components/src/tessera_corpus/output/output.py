"""An output: what is done, rows in parts that appear whole, and what failed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from tessera.errors import TooManyFailures
from tessera.extras import missing
from tessera_corpus.item import DUPLICATE, Embedded, Failure, Origin, request_of
from tessera_corpus.output import errors, openai
from tessera_corpus.output.directory import Description, Directory, found
from tessera_corpus.output.errors import ErrorTable
from tessera_corpus.output.known import Known
from tessera_corpus.output.lance import LanceTable
from tessera_corpus.output.openai import LinesTable
from tessera_corpus.output.parquet import ParquetTable
from tessera_corpus.output.row import Row, VectorKind
from tessera_corpus.output.settings import Format, OutputSettings
from tessera_corpus.output.table import Table
from tessera_corpus.shard import Shard


class Output:
    """Goes on with what an earlier run left; ids are unique in a run.

    A row is in the table when its part is published, and an id is in it once at most, whenever this process
    is killed: the old row of a changed item is taken out before the new one is published. What is not
    published then is not done, and the next run does it again. One thread calls it; another one may call
    ``done``.
    """

    def __init__(
        self,
        settings: OutputSettings,
        kind: VectorKind,
        shard: Shard | None = None,
        gives: Callable[[str, str, int | None], bool] | None = None,
    ) -> None:
        """``gives`` is the sources', by which ``finish`` knows what is gone; without it nothing is.

        Raises ``ConfigError`` where DIR is in use, cannot be read, or holds vectors of another kind."""
        _require_pyarrow()
        self._settings = settings
        self._kind = kind
        self._gives = None if settings.keep_gone else gives
        self._directory = Directory(settings.out, shard or Shard())
        self._directory.open(Description(format=settings.format, kind=kind), replace=settings.replace)
        try:
            self._table, self._errors = _of_format(settings.format, self._directory, kind)
            if isinstance(self._table, LanceTable):
                self._table.clean()
            self._known: Final = Known(self._table.published())
        except BaseException:
            self._directory.close()
            raise
        self._rows: list[Row] = []
        self._nbytes = 0
        self._began = 0.0
        # Old rows of what is there no more as it was, and failed.
        self._stale: set[str] = set()
        self.failures = self.gone = 0
        """Of this run: failures, published or not; rows that were removed."""

    @property
    def errors_path(self) -> Path:
        return self._errors.path

    @property
    def known(self) -> Known:
        """What the table had at the start."""
        return self._known

    def done(self, id: str, content_hash: bytes) -> bool:
        """Whether the table had this id with this content at the start."""
        if not self._known.has(id, content_hash):
            return False
        self._known.meet(id)
        self._errors.forget(id)
        return True

    def put(self, rows: Sequence[Embedded]) -> None:
        """Raises ``OutputFailed`` where a part cannot be written."""
        for embedded in rows:
            row = Row.of(embedded, self._kind)
            self._begin()
            self._rows.append(row)
            self._nbytes += row.nbytes
            self._errors.forget(row.id)
            self._known.meet(row.id)
            self._stale.discard(row.id)
            if row.place is not None:
                # A request that could not be read failed as one.
                self._errors.forget(request_of(row.id, row.place))
            if len(self._rows) >= self._settings.part_rows or self._nbytes >= self._settings.part_bytes:
                self._publish()
        self._publish_if_old()

    def fail(self, failure: Failure) -> None:
        """Raises ``TooManyFailures``, with all of it published, and ``OutputFailed``."""
        self._begin()
        self._errors.add(failure)
        self.failures += 1
        if failure.reason != DUPLICATE and self._known.unmet(failure.id):
            self._stale.add(failure.id)
        most = self._settings.max_errors
        if most is not None and self.failures > most:
            self._publish()
            raise TooManyFailures(
                f"{self.failures} items failed, the last one {failure.id}: {failure.reason}; --max-errors is "
                f"{most}. {self._errors.path} has all of them"
            )
        self._publish_if_old()

    def finish(self) -> None:
        """Publish what is left, and remove what is gone: rows that the run did not meet, but would have.

        The sources have been read to their ends. Raises ``OutputFailed``.
        """
        gives = self._gives
        if gives is None:
            return

        def gone(origin: Origin) -> bool:
            return gives(origin.id, origin.source, origin.page)

        self._errors.forget_gone(gone)
        self._publish()
        for part in self._known.unmet_parts():
            ids = {
                origin.id
                for origin in self._table.origins(part)
                if self._known.unmet(origin.id) and gone(origin)
            }
            if ids:
                self._table.remove(part, ids)
                self.gone += len(ids)

    def close(self) -> None:
        """Publish what is left, and let others write; raises ``OutputFailed``."""
        try:
            self._publish()
        finally:
            self._directory.close()

    def _begin(self) -> None:
        if not self._began:
            self._began = time.monotonic()

    def _publish_if_old(self) -> None:
        if self._began and time.monotonic() - self._began >= self._settings.part_seconds:
            self._publish()

    def _publish(self) -> None:
        if self._rows:
            self._remove([row.id for row in self._rows])
            self._table.append(self._rows)
            self._rows = []
            self._nbytes = 0
        if self._stale:
            self._remove(self._stale)
            self.gone += len(self._stale)
            for id in self._stale:
                self._known.meet(id)
            self._stale.clear()
        self._errors.publish()
        self._began = 0.0

    def _remove(self, rows: Iterable[str]) -> None:
        """Take rows that were there at the start out of their parts."""
        changed: dict[str, set[str]] = defaultdict(set)
        for id in rows:
            if (part := self._known.part_of(id)) is not None:
                changed[part].add(id)
        for part, ids in changed.items():
            self._table.remove(part, ids)


def known_before(settings: OutputSettings, kind: VectorKind) -> Known:
    """What a run would find done; nothing is written or locked. Raises ``ConfigError`` where it would."""
    _require_pyarrow()
    wanted = Description(format=settings.format, kind=kind)
    there = found(settings.out, wanted, replace=settings.replace)
    if there is None or wanted.differences(there):
        return Known(())
    table, _ = _of_format(settings.format, Directory(settings.out, Shard()), kind)
    return Known(table.published())


def _of_format(format: Format, directory: Directory, kind: VectorKind) -> tuple[Table, ErrorTable]:
    if format == "openai":
        failures = ErrorTable(directory, openai.ENDING, openai.read_failures, openai.write_failures)
        return LinesTable(directory, kind), failures
    table = LanceTable(directory, kind) if format == "lance" else ParquetTable(directory, kind)
    return table, ErrorTable(directory, ".parquet", errors.read_parquet, errors.write_parquet)


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing("writing tables", "pyarrow", extra="corpus") from None
