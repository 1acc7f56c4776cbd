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
=============  =====================================================================================

The schema's metadata has under ``tessera`` what all vectors have in common, as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from tessera_corpus.output.row import Row, VectorKind
from tessera_corpus.output.table import Origin

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

    vector = pa.list_(pa.from_numpy_dtype(np.dtype(kind.dtype)), kind.width)
    return pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("page", pa.int32()),
            pa.field("source", pa.string()),
            pa.field("content_hash", pa.binary()),
            pa.field("model", pa.string()),
            pa.field("fingerprint", pa.string()),
            pa.field("warning", pa.string()),
            pa.field("vector", pa.list_(vector) if kind.tokens else vector),
        ],
        metadata={"tessera": msgspec.json.encode(kind)},
    )


def table_of(rows: Sequence[Row], kind: VectorKind) -> pa.Table:
    """The rows as a table of ``schema_of``."""
    import pyarrow as pa

    schema = schema_of(kind)
    values = np.concatenate([row.values for row in rows])
    vectors: pa.Array = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), kind.width)
    if kind.tokens:
        bounds = np.cumsum([0, *(len(row.values) for row in rows)], dtype=np.int32)
        vectors = pa.ListArray.from_arrays(pa.array(bounds), vectors)
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
    return pa.Table.from_arrays([*arrays, vectors.cast(schema.field("vector").type)], schema=schema)
