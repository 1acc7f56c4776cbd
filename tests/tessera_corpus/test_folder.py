"""Folders as somebody hostile could leave them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera.imaging import decode
from tessera.local.content import ImageFile
from tessera_corpus.item import Document, Failure, Item
from tessera_corpus.shard import Shard
from tessera_corpus.sources.choice import glob_pattern
from tessera_corpus.sources.folder import Folder
from tessera_corpus.sources.passed import said_of
from tests.imaging.test_kinds import several


def read(root: Path, shard: Shard | None = None) -> list[Item | Document | Failure]:
    return list(Folder(root=root, max_bytes=100, shard=shard or Shard()).rows())


def reasons(root: Path) -> dict[str, str]:
    return {row.id: row.reason for row in read(root) if isinstance(row, Failure)}


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.MD", "a/é.txt", "c.txt", "B.png", ".hidden.txt", ".git/x.txt", "x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    rows = read(tmp_path)
    assert [row.id for row in rows] == ["B.png", "c.txt", "a/é.txt", "b/a.MD", "b/z.txt"]
    picture, text = rows[:2]
    assert isinstance(picture, Item) and picture.parts == (ImageFile(b"text of B.png"),)
    assert (
        isinstance(text, Item) and text.parts == ("text of c.txt",) and text.source == str(tmp_path / "c.txt")
    )


def test_shards_divide_the_files(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("t")
    (tmp_path / "empty.txt").touch()
    parts = [[row.id for row in read(tmp_path, Shard(number, 3))] for number in (1, 2, 3)]
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(row.id for row in read(tmp_path))


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "file.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (root / "folder").symlink_to(tmp_path / "outside")
    (root / "round").symlink_to(root)
    (root / "nowhere.txt").symlink_to(tmp_path / "nowhere")
    folder = Folder(root=root, max_bytes=100)
    assert not list(folder.rows()) and folder.passed_over() == {"links": 4}


def test_what_is_passed_over_is_counted_by_kind_and_by_shard(tmp_path: Path) -> None:
    names = ("a.CR2", "b.cr2", "b/c.docx", "README", "data.parquet", ".hidden", "read.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("t")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.bin").touch()
    everything = {".cr2": 2, ".docx": 1, "without an ending": 1, ".parquet": 1, "hidden": 2}
    folder = Folder(root=tmp_path, max_bytes=100)
    assert [row.id for row in folder.rows()] == ["read.txt"] and folder.passed_over() == everything
    parts = [Folder(root=tmp_path, max_bytes=100, shard=Shard(number, 3)) for number in (1, 2, 3)]
    assert sum(len(list(part.rows())) for part in parts) == 1
    assert sum((Counter(part.passed_over()) for part in parts), Counter()) == everything
    said = said_of(everything)
    assert said.startswith("7 files passed over: .cr2 2, hidden 2, ") and said.endswith(
        "where they are named; save documents as .pdf"
    )
    assert said_of({".csv": 1, ".txt": 1}).endswith(".txt 1; save tables as .parquet or .jsonl")
    assert said_of({"links": 1}) == "1 file passed over: links 1"
    assert said_of({f".{number}": 1 for number in range(12)}).endswith(", others 4")


def test_pages_of_a_tiff_are_rows(tmp_path: Path) -> None:
    (tmp_path / "fax.tif").write_bytes(several(10, 20, 30, marks=(0, 0, 1)))
    (tmp_path / "one.tif").write_bytes(several(10))
    rows = list(Folder(root=tmp_path, max_bytes=10_000).rows())
    assert [(row.id, row.page) for row in rows if isinstance(row, Item)] == [
        ("fax.tif#page=1", 1),
        ("fax.tif#page=2", 2),
        ("one.tif", None),
    ]
    shown = [decode(part.data, param="x") for row in rows for part in row.parts]  # type: ignore[union-attr]
    assert [image.getpixel((0, 0))[0] for image in shown] == [10, 20, 10]
    assert rows[2].parts == (ImageFile(several(10)),)  # type: ignore[union-attr]


def test_a_source_knows_what_it_would_give(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("t")
    folder = Folder(root=tmp_path, max_bytes=100, prefix="in/", pattern=glob_pattern("*.pdf"))
    assert folder.gives("in/b.pdf", f"{tmp_path}/b.pdf", None)
    assert folder.gives("in/b.pdf#page=3", f"{tmp_path}/b.pdf", 3)
    for id, place, page in (
        ("b.pdf", f"{tmp_path}/b.pdf", None),
        ("in/b.pdf#page=3", f"{tmp_path}/b.pdf", 2),
        ("in/c/b.pdf", f"{tmp_path}/c/b.pdf", None),
        ("in/b.txt", f"{tmp_path}/b.txt", None),
        ("in/b.pdf", "/elsewhere/b.pdf", None),
    ):
        assert not folder.gives(id, place, page)
    here = Folder(root=Path("."), max_bytes=100)
    assert here.gives("b/c.txt", "b/c.txt", None) and not here.gives("c.txt", "b/c.txt", None)
    (tmp_path / "a.txt").unlink()
    assert not folder.gives("in/b.pdf", f"{tmp_path}/b.pdf", None), "perhaps it is not mounted"
    parts = [Folder(root=Path("."), max_bytes=100, shard=Shard(number, 3)) for number in (1, 2, 3)]
    assert [part.gives("a.pdf#page=1", "a.pdf", 1) for part in parts].count(True) == 1


def test_what_is_no_item_is_a_row_with_the_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "full.txt").write_bytes(b"x" * 100)
    (tmp_path / "large.txt").write_bytes(b"x" * 101)
    (tmp_path / "empty.png").touch()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16-le"))
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("name")
    assert reasons(tmp_path) == {
        "pipe.txt": "not a regular file",
        "large.txt": "more than 100 bytes",
        "empty.png": "empty",
        "blank.txt": "empty",
        "latin.txt": "not UTF-8 from byte 3 on",
        "wide.txt": "not UTF-8: it has zero bytes, as UTF-16 has",
        "caf\\xe9.txt": "the name is not UTF-8",
    }
    assert [row.id for row in read(tmp_path) if isinstance(row, Item)] == ["full.txt"]


def test_a_deep_folder_ends(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 102)
    deep.mkdir(parents=True)
    (deep.parents[1] / "a.txt").write_text("read")
    (deep / "b.txt").write_text("not read")
    item, failure = sorted(read(tmp_path), key=lambda row: isinstance(row, Failure))
    assert isinstance(item, Item) and item.id.endswith("d/a.txt")
    assert isinstance(failure, Failure) and failure.reason == "deeper than 100 folders"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_a_row(tmp_path: Path) -> None:
    closed = tmp_path / "above" / "closed"
    closed.mkdir(parents=True)
    (closed.parent / "a.txt").write_text("t")
    closed.chmod(0)
    try:
        failures = reasons(tmp_path)
    finally:
        closed.chmod(0o700)
    assert failures == {"above/closed": "Permission denied"}


def test_the_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("t")
    for root in (tmp_path / "nowhere", tmp_path / "file.txt"):
        with pytest.raises(ConfigError, match=root.name):
            read(root)
