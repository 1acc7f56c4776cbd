"""Every kind of source, by a command: what a dry run counts, what a run embeds, and how both end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tessera_corpus.sources.folder import DOCUMENTS, FILES, PICTURES, TEXTS
from tessera_corpus.sources.tables import LINES, TABLES
from tests.imaging.test_kinds import several
from tests.tessera_corpus.command import embed, served
from tests.tessera_corpus.output.made import rows_in, write_lance
from tests.tessera_corpus.pdf_files import line, pdf, unembedded

pytestmark = [pytest.mark.embeds, pytest.mark.xdist_group("sources"), pytest.mark.usefixtures("forks")]

PAGES = pdf([line("one"), line("two")])
BROKEN = b"no picture"


def picture(red: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is named by the words, below a folder with everything: items, and what else there is."""

    words: Sequence[str]
    items: int
    failed: int = 0
    passed: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return 3 if self.failed else 0 if self.items else 1


KINDS = {
    "a folder": Kind(words=["folder"], items=len(FILES) + 1, failed=1, passed={".docx": 1, "links": 1}),
    "a file": Kind(words=["folder/a.png"], items=1),
    "a document": Kind(words=["folder/a.pdf"], items=2),
    "a scan of two pages": Kind(words=["scan.tif"], items=2),
    "files": Kind(words=["folder/a.md", "folder/broken.png", "folder/a.txt"], items=2, failed=1),
    "a glob": Kind(words=["folder/*.[mt]*"], items=4),
    "lines": Kind(words=["a.jsonl"], items=1, failed=1),
    "lines by another name": Kind(words=["a.ndjson"], items=1, failed=1),
    "standard input": Kind(words=["-"], items=1, failed=1),
    "a table": Kind(words=["a.parquet"], items=5, failed=1),
    "a Lance table": Kind(words=["a.lance"], items=5, failed=1),
    "a glob of tables": Kind(words=["tables/lang=*/*.parquet"], items=2),
    "a folder of tables": Kind(words=["tables"], items=5, failed=1, passed={".json": 1}),
    "tables of which one is damaged": Kind(
        words=["tables/lang=en/0.parquet", "bad.parquet"], items=1, failed=1
    ),
    "a folder of other things": Kind(words=["other"], items=0, passed={".docx": 1}),
    "an empty folder": Kind(words=["empty"], items=0),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("everything")
    for name in ("folder", "tables/lang=de", "tables/lang=en", "other", "empty"):
        (root / name).mkdir(parents=True)
    for number, ending in enumerate(sorted(PICTURES)):
        (root / f"folder/a{ending}").write_bytes(picture(number))
    for ending in TEXTS:
        (root / f"folder/a{ending}").write_text(f"a text called {ending}")
    for ending in DOCUMENTS:
        (root / f"folder/a{ending}").write_bytes(PAGES)
    (root / "folder/broken.png").write_bytes(BROKEN)
    (root / "folder/link.png").symlink_to("a.png")
    for name in ("folder", "other"):
        (root / name / "office.docx").write_bytes(b"PK")
    (root / "scan.tif").write_bytes(several(10, 20))
    for ending in LINES:
        (root / f"a{ending}").write_text('{"id": "a", "text": "one"}\n{"id": "b"}\n')
    # A picture, several as one, a document and a scan, and one that is none of them.
    images = [[picture(1)], [picture(2), picture(3)], [PAGES], [several(10)], [BROKEN]]
    table = pa.table({"id": list("abcde"), "image": pa.array(images, pa.list_(pa.binary()))})
    pq.write_table(table, root / "a.parquet")
    write_lance(table, root / "a.lance")
    for language in ("de", "en"):
        pq.write_table(pa.table({"text": [f"in {language}"]}), root / f"tables/lang={language}/0.parquet")
    write_lance(pa.table({"text": ["a row"]}), root / "tables/b.lance")
    for ending in LINES:
        (root / f"tables/c{ending}").write_text(f'{{"text": "a line of {ending}"}}\n')
    pq.write_table(pa.table({"number": [1]}), root / "tables/d.parquet")
    (root / "tables/schema.json").write_text("{}")
    (root / "bad.parquet").write_bytes((root / "a.parquet").read_bytes()[:-20])
    return root


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with served(tmp_path_factory.mktemp("service")) as found:
            yield found


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_tells_what_became_of_everything(everything: Path, url: str, tmp_path: Path, kind: str) -> None:
    asked = KINDS[kind]
    lines = (everything / "a.jsonl").read_text() if asked.words == ["-"] else ""
    words = [*asked.words, "--url", url, "--out", str(tmp_path / "out"), "--progress", "none"]
    counted = embed(
        *words, "--dry-run", cwd=everything, input=lines, status=int(not (asked.items or asked.failed))
    )
    # What a decoder refuses is known when it is embedded.
    found = re.match(r"(\d+) items to embed, 0 done before, (\d+) unreadable", counted.stdout)
    assert found is not None
    assert int(found[1]) + int(found[2]) == asked.items + asked.failed
    ran = embed(*words, cwd=everything, input=lines, status=asked.status)
    summary = ran.stdout.splitlines()[0]
    assert f": {asked.items} items embedded" in summary
    assert (f", {asked.failed} failed: " in summary) == bool(asked.failed)
    for said in (counted.stdout, ran.stdout):
        for name, count in asked.passed.items():
            assert re.search(rf"files? passed over: .*{re.escape(name)} {count}\b", said)
        assert ("passed over" in said) == bool(asked.passed)
    assert ("nothing to embed was found" in ran.stderr) == (asked.status == 1)
    assert len(rows_in(tmp_path / "out")) == asked.items
    if asked.failed:
        errors = pq.read_table(tmp_path / "out" / "errors.parquet").to_pylist()
        assert len(errors) == asked.failed and all(error["reason"] for error in errors)
        assert f"what failed: {errors[0]['id']}: {errors[0]['reason']}" in ran.stdout


def test_every_kind_of_file_is_among_them(everything: Path) -> None:
    named = {Path(word).suffix for kind in KINDS.values() for word in kind.words}
    assert named >= LINES | TABLES
    assert {path.suffix for path in (everything / "folder").iterdir()} >= FILES
    assert {path.suffix for path in (everything / "tables").rglob("*")} >= LINES | TABLES


def test_pages_that_lack_letters_are_counted(url: str, tmp_path: Path) -> None:
    """One without a font of its own for a letter that none has, and one that is as it should be."""
    (tmp_path / "b.pdf").write_bytes(unembedded("uniA500 uniA501"))
    (tmp_path / "a.pdf").write_bytes(unembedded("A"))
    ran = embed(tmp_path, "--url", url, "--out", tmp_path / "out", "--format", "openai")
    assert "2 items embedded" in ran.stdout and ", 1 with a warning" in ran.stdout
    (path,) = (tmp_path / "out" / "vectors").glob("*.jsonl")
    assert (
        sum(
            "2 letters without a font" in json.dumps(json.loads(row)) for row in path.read_text().splitlines()
        )
        == 1
    )
