"""What words of a command line name."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera_corpus.item import Failure, Item, Source
from tessera_corpus.sources.choice import glob_pattern, open_source
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.settings import SourceSettings


def opened(*words: str | Path) -> Source:
    return open_source([str(word) for word in words], SourceSettings(), Honoured(models=(), dimensions=8))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "b.png", "deep/a.txt", "deep/er/c.txt", "deep/er/d.md", "other/[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ids(source: Source) -> list[str]:
    return [row.id for row in source.rows()]


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "deep/a.txt", "deep/er/c.txt", "other/[x].txt"]),
        ("deep/**", ["a.txt", "er/c.txt", "er/d.md"]),
        ("deep/*/?.txt", ["er/c.txt"]),
        ("deep/**/*.[tm]*", ["a.txt", "er/c.txt", "er/d.md"]),
        ("[!a].*", ["b.png"]),
        ("other/[[]x].txt", ["[x].txt"]),
        ("*.pdf", []),
    ],
)
def test_globs(tree: Path, glob: str, found: list[str]) -> None:
    assert ids(opened(glob)) == found


def test_several_sources_have_ids_as_they_were_named(tree: Path) -> None:
    lines = tree / "in.jsonl"
    lines.write_text('{"id": "line", "text": "t"}\n')
    source = opened("deep", "a.txt", "other/*.txt", lines)
    assert ids(source) == ["deep/a.txt", "deep/er/c.txt", "deep/er/d.md", "a.txt", "other/[x].txt", "line"]
    assert source.position().read == source.position().most


def test_one_file(tree: Path) -> None:
    (item,) = opened("deep/a.txt").rows()
    assert item == Item(id="a.txt", source="deep/a.txt", parts=("text of deep/a.txt",))
    (tree / "link.txt").symlink_to(tree / "a.txt")
    (linked,) = opened("link.txt").rows()
    assert isinstance(linked, Item) and linked.parts == ("text of a.txt",)
    (tree / "blank.txt").write_text("")
    (blank,) = opened("blank.txt").rows()
    assert isinstance(blank, Failure) and blank.reason == "empty"


def test_standard_input(tree: Path) -> None:
    reader, writer = os.pipe()
    before = os.dup(0)
    try:
        os.dup2(reader, 0)
        with io.FileIO(writer, "w") as file:
            file.write(b'{"id": "a", "text": "t"}\n{"text": "u"}\n')
        assert ids(opened("-")) == ["a", "standard input:2"]
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reader)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing"], "missing: no such file or directory"),
        (["nowhere/*.txt"], "there is no directory nowhere"),
        (["run.sh"], r"run.sh: its ending is none of .*\.webp$"),
        (["list.csv"], r"list.csv: its ending is none of .*; save tables as \.parquet or \.jsonl$"),
        (["-", "-"], "can be read once"),
    ],
)
def test_what_is_no_source_is_refused(tree: Path, words: list[str], said: str) -> None:
    (tree / "run.sh").write_text("")
    (tree / "list.csv").write_text("")
    with pytest.raises(ConfigError, match=said):
        opened(*words)


def test_a_glob_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a glob"):
        glob_pattern("[z-a].txt")
