"""The columns that Parquet files and Lance tables have.

=============  =====================================================================================
column         type
=============  =====================================================================================
id             string
page           int32, null where the source has no pages
source         string
content_hash   binary, 32 bytes
model          string
fingerprint    string
warning        string, null for most: what of the item could not be shown
vector         ``fixed_size_list`` of float32, float16 or int8; with token vectors a list of such
sparse         struct of ``indices``, a list of uint32, and ``values``, a list of float32 of its length
multivector    as ``vector`` with token vectors
=============  =====================================================================================

The last two are those of further outputs, under their names. A sparse row read as a dict is what Qdrant's
``SparseVector`` and Milvus' fields take, and Milvus imports such a struct of Parquet files.

The schema's metadata has under ``tessera`` what all vectors have in common, as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from tessera.models.base import OutputKind
from tessera_corpus.item import Origin
from tessera_corpus.output.row import Column, Row, VectorKind

if TYPE_CHECKING:
    import pyarrow as pa


ORIGIN: Final = ("id", "source", "page")
"""The columns that say where an item was read."""


def origins_of(batch: Any) -> Iterator[Origin]:
    """The items of a batch with these columns."""
    ids, sources, pages = (batch.column(name).to_pylist() for name in ORIGIN)
    for id, source, page in zip(ids, sources, pages, strict=True):
        yield Origin(id=id, source=source, page=page)


def schema_of(kind: VectorKind) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("page", pa.int32()),
            pa.field("source", pa.string()),
            pa.field("content_hash", pa.binary()),
            pa.field("model", pa.string()),
            pa.field("fingerprint", pa.string()),
            pa.field("warning", pa.string()),
            *[pa.field(column.name, _type_of(column, kind)) for column in kind.columns],
        ],
        metadata={"tessera": msgspec.json.encode(kind)},
    )


def _type_of(column: Column, kind: VectorKind) -> pa.DataType:
    import pyarrow as pa

    if column.kind is OutputKind.SPARSE:
        return pa.struct([("indices", pa.list_(pa.uint32())), ("values", pa.list_(pa.float32()))])
    vector = pa.list_(pa.from_numpy_dtype(np.dtype(kind.dtype)), column.width)
    return pa.list_(vector) if column.kind is OutputKind.TOKENS else vector


def _array_of(column: Column, rows: Sequence[Row], place: int) -> pa.Array:
    """The column, which is at that place among those of outputs."""
    import pyarrow as pa

    values = np.concatenate([row.values[place] for row in rows])
    bounds = pa.array(np.cumsum([0, *(len(row.values[place]) for row in rows)], dtype=np.int32))
    if column.kind is OutputKind.SPARSE:
        ids = np.concatenate([found for row in rows if (found := row.ids[place]) is not None])
        lists = [
            pa.ListArray.from_arrays(bounds, pa.array(flat)) for flat in (ids.astype(np.uint32), values[:, 0])
        ]
        return pa.StructArray.from_arrays(lists, ["indices", "values"])
    vectors: pa.Array = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), column.width)
    return pa.ListArray.from_arrays(bounds, vectors) if column.kind is OutputKind.TOKENS else vectors


def table_of(rows: Sequence[Row], kind: VectorKind) -> pa.Table:
    """The rows as a table of ``schema_of``."""
    import pyarrow as pa

    schema = schema_of(kind)
    columns: dict[str, Any] = {
        "id": [row.id for row in rows],
        "page": [row.page for row in rows],
        "source": [row.source for row in rows],
        "content_hash": [row.content_hash for row in rows],
        "model": [kind.model] * len(rows),
        "fingerprint": [kind.fingerprint] * len(rows),
        "warning": [row.warning for row in rows],
    }
    arrays = [pa.array(column, schema.field(name).type) for name, column in columns.items()]
    for place, column in enumerate(kind.columns):
        arrays.append(_array_of(column, rows, place).cast(schema.field(column.name).type))
    return pa.Table.from_arrays(arrays, schema=schema)
