"""Tables of Parquet and Lance as sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tessera.errors import ConfigError
from tessera.local.content import ImageFile
from tessera_corpus.item import Document, Failure, Item, Row
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.settings import Columns, SourceSettings
from tests.tessera_corpus.output.made import write_lance

HONOURED = Honoured(models=(), dimensions=256)


def read(path: Path, **settings: Any) -> list[Row]:
    return list(open_source([str(path)], SourceSettings(**settings), HONOURED).rows())


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_rows_of_a_table(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    table = pa.table(
        {
            "id": ["text", "bytes", None, "none", "path"],
            "text": ["t", "beside", "third", " ", None],
            "image": pa.array([None, b"png", None, None, b"x"], pa.binary()),
            "page": pa.array([None, 3, None, None, 4], pa.int32()),
            "score": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    path = tmp_path / f"in.{kind}"
    pq.write_table(table, path) if kind == "parquet" else write_lance(table, path)
    rows = read(path)
    assert rows[0] == Item(id="text", source=f"{path}:0", parts=("t",))
    assert rows[1] == Item(id="bytes", source=f"{path}:1", page=3, parts=(ImageFile(b"png"), "beside"))
    assert rows[2] == Item(id=f"{path}:2", source=f"{path}:2", parts=("third",))
    assert rows[3] == Failure(id="none", source=f"{path}:3", reason="neither text nor image")
    assert rows[4] == Item(id="path", source=f"{path}:4", page=4, parts=(ImageFile(b"x"),))
    source = open_source([str(path)], SourceSettings(), HONOURED)
    assert len(list(source.rows())) == 5
    assert (source.position().read, source.position().most) == (5, 5)


def test_images_by_name_and_as_datasets_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    names = pa.table({"key": [1, 2, 3], "picture": ["a.png", "b.pdf", "../outside.png"]})
    pq.write_table(names, tmp_path / "names.parquet")
    columns = Columns(id="key", image="picture")
    first, second, third = read(tmp_path / "names.parquet", columns=columns, root=tmp_path)
    assert isinstance(first, Item) and first.id == "1" and first.parts == (ImageFile(b"a"),)
    assert isinstance(second, Document) and second.data == b"%PDF"
    assert isinstance(third, Failure) and "no readable file" in third.reason
    structs = pa.table({"image": [{"bytes": b"own", "path": "x.png"}, {"bytes": None, "path": "a.png"}]})
    pq.write_table(structs, tmp_path / "structs.parquet")
    one, other = read(tmp_path / "structs.parquet", root=tmp_path)
    assert isinstance(one, Item) and one.parts == (ImageFile(b"own"),)
    assert isinstance(other, Item) and other.parts == (ImageFile(b"a"),)


def test_tables_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"bad\.parquet"):
        read(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="there are a; --text-column"):
        read(tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1.5], "image": [2]}), tmp_path / "types.parquet")
    (row,) = read(tmp_path / "types.parquet")
    assert isinstance(row, Failure) and row.reason == "text: expected a text"
    (tmp_path / "empty.lance").mkdir()
    with pytest.raises(ConfigError, match=r"empty\.lance"):
        read(tmp_path / "empty.lance")
