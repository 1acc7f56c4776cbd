"""Rows of a corpus that a test makes up: the content says what the vector is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from blake3 import blake3
from msgspec import structs

from tessera.models.base import OutputKind
from tessera.rows import Rows
from tessera_corpus.item import Embedded
from tessera_corpus.output.output import Output
from tessera_corpus.output.row import Column, VectorKind
from tessera_corpus.output.settings import OutputSettings
from tessera_corpus.shard import Shard

WIDTH = 8


def write_lance(table: Any, path: Path) -> None:
    """Write a table as another program would.

    Lance is imported where it is used: every process that collects the tests would import pandas with it.
    """
    import lance

    lance.write_dataset(table, str(path))


def kind_of(**others: Any) -> VectorKind:
    given: dict[str, Any] = {"model": "m", "fingerprint": "f", "width": WIDTH, "tokens": False}
    return VectorKind(**given | {"dtype": "float32"} | others)


def content_of(text: str) -> bytes:
    return blake3(text.encode()).digest()


def place_of(id: str) -> int | None:
    """What these tests call ``list#N`` is an input of a request."""
    return int(id.removeprefix("list#")) if id.startswith("list#") else None


THREE = (
    Column(name="sparse", kind=OutputKind.SPARSE, width=1),
    Column(name="multivector", kind=OutputKind.TOKENS, width=WIDTH),
)
"""The columns beside ``vector`` of a model with three outputs."""


def three(id: str, text: str) -> Embedded:
    """An item with a vector, the columns of ``THREE``, and as many weights as its text has characters."""
    made = embedded(id, text)
    ids = np.cumsum(np.frombuffer(text.encode(), np.uint8), dtype=np.int32)
    ones = np.ones(len(ids), np.float32)
    weights = Rows(ids[:, None].astype(np.float32) / 8, np.array((0, len(ids))), ones, ids)
    return structs.replace(made, rows=replace(made.rows, others=(weights, embedded(id, text, rows=3).rows)))


def embedded(id: str, text: str, rows: int = 1) -> Embedded:
    values = np.frombuffer(blake3(text.encode()).digest(rows * WIDTH), np.int8).astype(np.float32)
    return Embedded(
        id=id,
        source=f"/corpus/{id}",
        page=None,
        place=place_of(id),
        content_hash=content_of(text),
        rows=Rows(values.reshape(rows, WIDTH) / 128, np.array((0, rows)), np.ones(rows, np.float32)),
        tokens=3 * rows,
    )


def opened(
    out: Path, *, shard: Shard | None = None, kind: VectorKind | None = None, **settings: Any
) -> Output:
    return Output(OutputSettings(out=out, **settings), kind or kind_of(), shard)


def fill(output: Output, corpus: Iterable[tuple[str, str]]) -> list[str]:
    """What a run does; the ids that were not done."""
    fresh = [(id, text) for id, text in corpus if not output.done(id, content_of(text))]
    for id, text in fresh:
        output.put([embedded(id, text)])
    output.close()
    return [id for id, _ in fresh]


def rows_in(out: Path) -> list[dict[str, Any]]:
    """Every row: of Parquet parts, of a Lance table, or of the lines of an OpenAI batch."""
    if (out / "vectors.lance").exists():
        import lance

        return lance.dataset(out / "vectors.lance").to_table().to_pylist()
    rows = [
        row
        for path in sorted((out / "vectors").glob("*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    for path in sorted((out / "vectors").glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            for vector in line["response"]["body"]["data"]:
                place = f"#{vector['index']}" if line["input_is_list"] else ""
                content_hash = bytes.fromhex(vector["content_hash"])
                rows.append(
                    {
                        "id": line["custom_id"] + place,
                        "content_hash": content_hash,
                        "vector": vector["embedding"],
                        "sparse": vector.get("sparse_embedding"),
                        "multivector": vector.get("multi_vector"),
                    }
                )
    return rows


def texts_in(out: Path, corpus: dict[str, str]) -> list[str]:
    """Sorted ids; each row has the vector and the hash of its text in ``corpus``, or the assertion fails."""
    rows = rows_in(out)
    for row in rows:
        wanted = embedded(row["id"], corpus[row["id"]])
        assert row["content_hash"] == wanted.content_hash
        assert row["vector"] == wanted.rows.values[0].tolist()
    return sorted(row["id"] for row in rows)
