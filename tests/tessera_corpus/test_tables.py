"""Folders of tables and of lines, as other programs leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from tessera.errors import ConfigError
from tessera.local.content import ImageFile
from tessera_corpus.item import Document, Failure, Item, Row, Source
from tessera_corpus.shard import Shard
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.settings import SourceSettings
from tests.imaging.test_kinds import several
from tests.tessera_corpus.output.made import write_lance

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("forks")]


def opened(*paths: Path | str, **settings: Any) -> Source:
    words = [str(path) for path in paths]
    return open_source(words, SourceSettings(**settings), Honoured(models=(), dimensions=256))


def texts(rows: list[Row]) -> list[str]:
    return [str(row.parts[0]) for row in rows if isinstance(row, Item)]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Partitions as pyarrow and Spark write them, with lines and a Lance table, and what is neither."""
    root = tmp_path / "dataset"
    table = pa.table({"lang": ["de", "de", "en"], "text": ["eins", "zwei", "one"]})
    flavour = pa.dataset.partitioning(pa.schema([("lang", pa.string())]), flavor="hive")
    pa.dataset.write_dataset(table, root, format="parquet", partitioning=flavour)
    (root / "_SUCCESS").touch()
    (root / "lang=de" / ".part-0.parquet.crc").touch()
    (root / "schema.json").write_text("{}")
    (root / "more.jsonl").write_text('{"text": "three"}\n')
    write_lance(pa.table({"text": ["four"]}), root / "z.lance")
    return root


def test_a_folder_of_tables_is_read_table_by_table(dataset: Path) -> None:
    source = opened(dataset)
    rows = list(source.rows())
    assert texts(rows) == ["eins", "zwei", "one", "three", "four"]
    assert rows[0].id == rows[0].source == f"{dataset}/lang=de/part-0.parquet:0"
    assert dict(source.passed_over()) == {"hidden": 2, ".json": 1}
    parts = [opened(dataset, shard_text=f"{number}/3") for number in (1, 2, 3)]
    assert sorted(text for part in parts for text in texts(list(part.rows()))) == sorted(texts(rows))
    assert sum(count for part in parts for count in part.passed_over().values()) == 3


def test_a_table_may_be_a_folder(dataset: Path, tmp_path: Path) -> None:
    """As Spark writes one: its parts in a folder that is called like a file."""
    spark = dataset.rename(tmp_path / "out.parquet")
    assert len(list(opened(spark).rows())) == len(list(opened(f"{tmp_path}/*.parquet").rows())) == 5


def test_a_folder_with_files_of_other_kinds_is_of_those(dataset: Path) -> None:
    (dataset / "a.txt").write_text("a text")
    source = opened(dataset)
    assert texts(list(source.rows())) == ["a text"]
    assert source.passed_over()[".parquet"] == 2


def test_what_a_run_has_written_is_no_source(dataset: Path) -> None:
    out = dataset / "out"
    (out / "vectors").mkdir(parents=True)
    (out / "tessera.json").write_text("{}")
    pq.write_table(pa.table({"text": ["not this"]}), out / "vectors" / "part-1-of-1-000001.parquet")
    assert len(list(opened(dataset).rows())) == 5


def test_one_of_several_tables_that_has_nothing_to_embed_is_a_failure(dataset: Path) -> None:
    odd = dataset / "odd.parquet"
    pq.write_table(pa.table({"number": [1, 2]}), odd)
    failed = [row for row in opened(dataset).rows() if isinstance(row, Failure)]
    assert [row.id for row in failed] == [str(odd)]
    assert failed[0].reason.startswith("has neither a column 'text' nor 'image': there are number")
    with pytest.raises(ConfigError, match="there are number"):
        list(opened(odd).rows())


def test_rows_of_a_table_that_is_gone_are_the_folder_s(dataset: Path) -> None:
    gone = dataset / "lang=en" / "part-0.parquet"
    gone.unlink()
    source = opened(dataset)
    assert source.gives(f"{gone}:0", f"{gone}:0", None)
    assert source.gives("own", f"{dataset}/gone.jsonl:1", None)
    assert not source.gives("own", "/elsewhere/gone.parquet:0", None)
    assert not source.gives("own", f"{dataset}/gone.txt", None)
    id = f"{gone}:0"
    held = [opened(dataset, shard_text=f"{number}/2").gives(id, id, None) for number in (1, 2)]
    assert held == [Shard(1, 2).holds(id), Shard(2, 2).holds(id)]


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_images_of_a_list_are_one_input(tmp_path: Path, kind: str) -> None:
    rows = {
        "two": [b"a", b"b"],
        "one": [b"c"],
        "none": None,
        "hole": [b"a", None],
        "pages": [b"a", several(10, 20)],
        "documents": [b"%PDF-1.7", b"a"],
        "document": [b"%PDF-1.7"],
    }
    path = tmp_path / f"lists.{kind}"
    images = pa.array(list(rows.values()), pa.list_(pa.binary()))
    table = pa.table({"id": list(rows), "image": images, "text": ["t", None, "t", *[None] * 4]})
    pq.write_table(table, path) if kind == "parquet" else write_lance(table, path)
    found = {row.id: row for row in opened(path).rows()}
    two, one, none = found["two"], found["one"], found["none"]
    assert isinstance(two, Item) and two.parts == (ImageFile(b"a"), ImageFile(b"b"), "t")
    assert isinstance(one, Item) and one.parts == (ImageFile(b"c"),)
    assert isinstance(none, Item) and none.parts == ("t",)
    reasons = {row.id: row.reason for row in found.values() if isinstance(row, Failure)}
    assert reasons == {
        "hole": "image: nothing at place 1 of 2 images",
        "pages": "a file of several pages among several images",
        "documents": "a file of several pages among several images",
    }
    assert isinstance(found["document"], Document)


def test_lists_of_images_as_datasets_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    structs = [[{"bytes": b"own", "path": "x.png"}, {"bytes": None, "path": "a.png"}], [], [3]]
    pq.write_table(pa.table({"image": structs[:2], "text": ["t", "u"]}), tmp_path / "structs.parquet")
    both, alone = opened(tmp_path / "structs.parquet", root=tmp_path).rows()
    assert isinstance(both, Item) and both.parts == (ImageFile(b"own"), ImageFile(b"a"), "t")
    assert isinstance(alone, Item) and alone.parts == ("u",)
    pq.write_table(pa.table({"image": structs[2:]}), tmp_path / "numbers.parquet")
    (failure,) = opened(tmp_path / "numbers.parquet").rows()
    assert isinstance(failure, Failure)
    assert failure.reason == "image: expected bytes, a path or a URL, or a list of them"
