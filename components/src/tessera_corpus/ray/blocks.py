"""What the stages of a pipeline hand on, as blocks of Ray Data: a kind and MessagePack for each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tessera.local.messages import OutputRows
from tessera.rows import Rows
from tessera_corpus.item import Embedded, Failure, Hashed, Item


class LeftOut(msgspec.Struct, frozen=True, array_like=True):
    """Items that the output had at the start: id and content hash of each; and what was passed over."""

    items: list[tuple[str, bytes]]
    passed_over: dict[str, int] = {}


Row = Item | Failure | Embedded | LeftOut


class _Vectors(Hashed, frozen=True, kw_only=True, array_like=True):
    outputs: list[OutputRows]
    tokens: int


_KINDS: tuple[type[Item | Failure | _Vectors | LeftOut], ...] = (Item, Failure, _Vectors, LeftOut)
"""By what stands in the column ``kind``."""


def block_of(rows: Iterable[Row]) -> Any:
    """A ``pyarrow.Table`` with the columns ``kind`` and ``data``."""
    import pyarrow as pa

    kinds, data = [], []
    for row in rows:
        sent = _sent(row) if isinstance(row, Embedded) else row
        kinds.append(_KINDS.index(type(sent)))
        data.append(msgspec.msgpack.encode(sent))
    return pa.table({"kind": pa.array(kinds, pa.uint8()), "data": pa.array(data, pa.large_binary())})


def rows_of(block: Any) -> Iterator[Row]:
    for kind, data in zip(block["kind"].to_pylist(), block["data"].to_pylist(), strict=True):
        row = msgspec.msgpack.decode(data, type=_KINDS[kind])
        yield _embedded(row) if isinstance(row, _Vectors) else row


def _sent(row: Embedded) -> _Vectors:
    outputs = [OutputRows.of(rows) for rows in row.rows.each()]
    return _Vectors(**row.identity, outputs=outputs, tokens=row.tokens)


def _embedded(row: _Vectors) -> Embedded:
    rows = Rows.together([output.rows() for output in row.outputs])
    return Embedded(**row.identity, rows=rows, tokens=row.tokens)
