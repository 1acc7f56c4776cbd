"""Folders as somebody hostile could leave them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera.local.content import ImageFile
from tessera_corpus.item import Document, Failure, Item
from tessera_corpus.shard import Shard
from tessera_corpus.sources.folder import Folder


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
    assert reasons(root) == dict.fromkeys(("file.txt", "folder", "round", "nowhere.txt"), "a link")
    assert len(read(root)) == 4


def test_what_is_no_item_is_a_row_with_the_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "full.txt").write_bytes(b"x" * 100)
    (tmp_path / "large.txt").write_bytes(b"x" * 101)
    (tmp_path / "empty.png").touch()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("name")
    assert reasons(tmp_path) == {
        "pipe.txt": "not a regular file",
        "large.txt": "more than 100 bytes",
        "empty.png": "empty",
        "blank.txt": "empty",
        "latin.txt": "not UTF-8 from byte 3 on",
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
