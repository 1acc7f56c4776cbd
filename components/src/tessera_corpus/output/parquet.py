"""Vectors as Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tessera.errors import ConfigError
from tessera.models.base import OutputKind
from tessera_corpus.item import Origin
from tessera_corpus.output.columns import ORIGIN, origins_of, schema_of, table_of
from tessera_corpus.output.directory import Directory
from tessera_corpus.output.row import VECTOR, Column, Row, VectorKind
from tessera_corpus.output.table import Published

if TYPE_CHECKING:
    import pyarrow as pa

ENDING: Final = ".parquet"
# Of vectors in a row group, which readers take at once.
_GROUP_BYTES: Final = 16 << 20
_READ_ROWS: Final = 65_536


class ParquetTable:
    """``DIR/vectors/*.parquet``."""

    def __init__(self, directory: Directory, kind: VectorKind) -> None:
        self._directory = directory
        self._kind = kind
        self._number = directory.next_part(ENDING)

    def published(self) -> Iterator[Published]:
        import pyarrow.parquet as pq

        for path in sorted(self._directory.vectors.glob(f"*{ENDING}")):
            try:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(_READ_ROWS, columns=["id", "content_hash"]):
                        ids, hashes = batch.column("id").to_pylist(), batch.column("content_hash").to_pylist()
                        yield Published(part=path.name, ids=ids, content_hashes=hashes)
            except FileNotFoundError:
                # Another shard took its last row out.
                continue
            except (OSError, ValueError, KeyError) as error:
                raise ConfigError(f"{path}: not a part that can be read: {error}") from error

    def append(self, rows: Sequence[Row]) -> None:
        table = table_of(rows, self._kind)
        part = self._directory.part(self._number, ENDING)
        self._directory.publish(part, lambda path: self._write(path, [table]))
        self._number += 1

    def origins(self, part: str) -> Iterator[Origin]:
        import pyarrow.parquet as pq

        path = self._directory.vectors / part
        # Another shard may have taken its last row out.
        if path.exists():
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_READ_ROWS, columns=list(ORIGIN)):
                    yield from origins_of(batch)

    def remove(self, part: str, ids: Set[str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._directory.vectors / part
        # Another shard may take rows of its own out of the same part.
        with self._directory.alone():
            try:
                file = pq.ParquetFile(path)
            except FileNotFoundError:
                return
            with file:
                kept = [
                    [id not in ids for id in file.read_row_group(group, columns=["id"]).column(0).to_pylist()]
                    for group in range(file.num_row_groups)
                ]
                if all(map(all, kept)):
                    return
                if not any(map(any, kept)):
                    self._directory.remove(path)
                    return
                groups = (
                    _with_warning(file.read_row_group(group).filter(pa.array(which)))
                    for group, which in enumerate(kept)
                    if any(which)
                )
                self._directory.publish(path, lambda temporary: self._write(temporary, groups))

    def _write(self, path: Path, tables: Iterator[pa.Table] | Sequence[pa.Table]) -> None:
        import pyarrow.parquet as pq

        schema = schema_of(self._kind)
        leaves = [leaf for column in self._kind.columns for leaf in _leaves(column)]
        vectors = [column.name for column in self._kind.columns]
        texts = [name for name in schema.names if name not in vectors]
        with pq.ParquetWriter(
            path,
            schema,
            # Floats get no smaller by either. int8, which Parquet has as int32, takes one byte in a
            # dictionary, and four without.
            compression=dict.fromkeys(leaves, "none") | dict.fromkeys(texts, "zstd"),
            use_dictionary=[
                "source",
                "model",
                "fingerprint",
                *(leaves if self._kind.dtype == "int8" else []),
            ],
            write_statistics=["id", "page"],
        ) as writer:
            for table in tables:
                nbytes = sum(table.column(name).nbytes for name in vectors)
                rows = max(1, table.num_rows * _GROUP_BYTES // max(1, nbytes))
                writer.write_table(table.cast(schema), row_group_size=rows)


def _leaves(column: Column) -> Sequence[str]:
    """The leaves of a column's values, as Parquet names them; a sparse one's ids are compressed."""
    match column.kind:
        case OutputKind.SPARSE:
            return (f"{column.name}.values.list.element",)
        case OutputKind.TOKENS:
            return (f"{column.name}.list.element.list.element",)
        case _:
            return (f"{column.name}.list.element",)


def _with_warning(table: pa.Table) -> pa.Table:
    """The table of a part that was written before there were warnings, with the column."""
    import pyarrow as pa

    if "warning" in table.schema.names:
        return table
    place = table.schema.get_field_index(VECTOR)
    return table.add_column(place, pa.field("warning", pa.string()), pa.nulls(table.num_rows, pa.string()))
