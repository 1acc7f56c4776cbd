"""Sources that another process reads: the same rows, the same errors, and an end of it in every case."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.proc import below

from tessera.errors import ConfigError, Unavailable
from tessera.local.content import ImageFile
from tessera_corpus.item import Document, Failure, Item, Row
from tessera_corpus.sources.apart import Apart
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.messages import Sources
from tessera_corpus.sources.settings import SourceSettings
from tests.proc import title

pytestmark = pytest.mark.starts

HONOURED = Honoured(models=("m",), dimensions=8)


def apart(path: Path) -> Apart:
    return Apart(Sources(words=[str(path)], settings=SourceSettings(root=path.parent), honoured=HONOURED))


def some_lines(folder: Path, count: int) -> Path:
    """Texts, a picture and a document among them, and what cannot be read."""
    folder.joinpath("a.png").write_bytes(b"\x89PNG")
    folder.joinpath("b.pdf").write_bytes(b"%PDF")
    body = {"input": "a batch line", "model": "m"}
    lines = [
        {"id": "picture", "image": "a.png"},
        {"id": "document", "image": "b.pdf"},
        {"id": "nothing"},
        {"custom_id": "line", "method": "POST", "url": "/v1/embeddings", "body": body},
        *({"id": f"{number}", "text": f"text {number}"} for number in range(count)),
    ]
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def children() -> list[int]:
    return [pid for pid in below(os.getpid()) if "read_process" in title(pid)]


def test_rows_are_those_of_the_source(tmp_path: Path) -> None:
    path = some_lines(tmp_path, 300)
    source = apart(path)
    found: list[Row] = list(source.rows())
    assert found == list(open_source([str(path)], SourceSettings(root=tmp_path), HONOURED).rows())
    assert ImageFile(b"\x89PNG") in {part for row in found if isinstance(row, Item) for part in row.parts}
    assert {type(row) for row in found} == {Item, Document, Failure}
    assert source.position().read == source.position().most == path.stat().st_size
    assert not children()


def test_an_error_of_the_source_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ConfigError, match=r"table\.parquet: has neither"):
        list(apart(path).rows())
    assert not children()


def test_rows_that_nobody_wants_any_more_end_the_process(tmp_path: Path) -> None:
    rows = apart(some_lines(tmp_path, 100_000)).rows()
    next(rows)
    assert children()
    rows.close()  # type: ignore[attr-defined]
    assert not children()


def test_the_end_of_the_process_is_an_error(tmp_path: Path) -> None:
    rows = apart(some_lines(tmp_path, 100_000)).rows()
    next(rows)
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="reads the sources was ended by SIGKILL"):
        list(rows)
