"""Vectors as a Lance table, with the columns of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from tessera.errors import ConfigError, OutputFailed
from tessera.extras import missing
from tessera_corpus.item import Origin
from tessera_corpus.output.columns import ORIGIN, origins_of, table_of
from tessera_corpus.output.directory import Directory
from tessera_corpus.output.row import Row, VectorKind
from tessera_corpus.output.table import Published

if TYPE_CHECKING:
    import lance

NAME: Final = "vectors.lance"
# Versions that a reader may still have open, and that a user may want back, are kept for so long.
_VERSIONS: Final = timedelta(days=14)
# Of one expression.
_IDS: Final = 1000


class LanceTable:
    """``DIR/vectors.lance``; each call is a commit of Lance's own, one shard's at a time."""

    def __init__(self, directory: Directory, kind: VectorKind) -> None:
        self._directory = directory
        self._kind = kind
        self._path = str(directory.path / NAME)

    def clean(self) -> None:
        """Remove old versions, and what runs wrote that were killed before they committed it."""
        with self._directory.alone():
            if (dataset := self._open()) is not None:
                # Nobody is writing.
                dataset.cleanup_old_versions(older_than=_VERSIONS, delete_unverified=True)

    def published(self) -> Iterator[Published]:
        if (dataset := self._open()) is None:
            return
        for batch in dataset.to_batches(columns=["id", "content_hash"]):
            ids, hashes = batch.column("id").to_pylist(), batch.column("content_hash").to_pylist()
            yield Published(part=NAME, ids=ids, content_hashes=hashes)

    def append(self, rows: Sequence[Row]) -> None:
        import lance
        import pyarrow as pa

        table = table_of(rows, self._kind)
        with self._directory.alone():
            there = self._open()
            try:
                if there is not None and "warning" not in there.schema.names:
                    # It was written before there were warnings.
                    there.add_columns(pa.field("warning", pa.string()))
                lance.write_dataset(table, self._path, mode="append" if there else "create")
            except (OSError, ValueError, RuntimeError) as error:
                raise OutputFailed(f"{self._path}: {error}") from error

    def origins(self, part: str) -> Iterator[Origin]:
        if (dataset := self._open()) is not None:
            for batch in dataset.to_batches(columns=list(ORIGIN)):
                yield from origins_of(batch)

    def remove(self, part: str, ids: Set[str]) -> None:
        with self._directory.alone():
            dataset = self._open()
            assert dataset is not None
            try:
                quoted = sorted(map(_quoted, ids))
                for first in range(0, len(quoted), _IDS):
                    dataset.delete(f"id IN ({', '.join(quoted[first : first + _IDS])})")
            except (OSError, ValueError, RuntimeError) as error:
                raise OutputFailed(f"{self._path}: {error}") from error

    def _open(self) -> lance.LanceDataset | None:
        try:
            import lance
        except ImportError:
            raise missing("a Lance table", "pylance", extra="lance") from None
        if not (self._directory.path / NAME).exists():
            return None
        try:
            return lance.dataset(self._path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path}: not a table that can be read: {error}") from error


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
