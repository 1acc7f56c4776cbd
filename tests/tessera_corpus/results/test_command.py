"""``tessera search`` as a user runs it, against a running service: its list, its page, its sheet."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tessera_corpus.output.directory import DESCRIPTION
from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import parts
from tests.imaging.test_kinds import several

pytestmark = [
    pytest.mark.service,
    pytest.mark.xdist_group("shared-service"),
    pytest.mark.usefixtures("forks"),
]

NASTY = "<script>document.title='x'<script> & \" \x1b[31m.png"


@dataclass(frozen=True, slots=True)
class Command:
    """``tessera`` with a service to ask, in a directory of its own."""

    cwd: Path
    url: str
    key: str

    def start(self, *words: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tessera.cli", *map(str, words)],
            cwd=self.cwd,
            env=os.environ | {"TESSERA_API_KEY": self.key} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, status: int = 0, **environment: str) -> str:
        """What it printed on standard output, or on standard error when it was to fail."""
        process = self.start(*words, **environment)
        output, errors = process.communicate(timeout=180)
        assert process.returncode == status, output + errors
        assert "Traceback" not in errors
        return errors if status else output

    def search(self, *words: str | Path, status: int = 0, **environment: str) -> str:
        return self.run("search", "vectors", *words, "--url", self.url, status=status, **environment)


@pytest.fixture(scope="module")
def tessera(
    service: Disaggregated, photos: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Command:
    """Pictures are embedded, one of them twice, and a text."""
    cwd = tmp_path_factory.mktemp("search")
    command = Command(cwd, service.url, service.key)
    folder = cwd / "pictures"
    (folder / "below").mkdir(parents=True)
    for name, data in photos.items():
        (folder / f"{name}.jpg").write_bytes(data)
    (folder / "below" / "again.JPG").write_bytes(photos["flower"])
    Image.new("RGBA", (90, 60), (200, 30, 30, 128)).save(folder / NASTY)
    (folder / "notes.txt").write_text("notes of a & b <b>")
    command.run("embed", "pictures", "--out", "vectors", "--url", service.url, "--progress", "none")
    return command


class Reader(HTMLParser):
    """Tags, addresses and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_vectors_that_an_earlier_version_made_are_made_again(tessera: Command, tmp_path: Path) -> None:
    older = shutil.copytree(tessera.cwd / "vectors", tmp_path / "older")
    described = (older / DESCRIPTION).read_text()
    fingerprint = json.loads(described)["kind"]["fingerprint"]
    (older / DESCRIPTION).write_text(described.replace(fingerprint, fingerprint[::-1]))
    said = tessera.run("search", older, "a flower", "--url", tessera.url, status=1)
    assert "others now: tessera embed --replace makes them again" in said


def test_a_text_ranks_what_is_there(
    tessera: Command, service: Disaggregated, photos: dict[str, bytes]
) -> None:
    output = tessera.search("a red flower", "--sheet", "out.png", "--html", "out.html")
    folder = tessera.cwd / "pictures"
    pictures = [photos["china"], photos["flower"], (folder / NASTY).read_bytes()]
    embedded = service.embed(*(parts(None, data) for data in pictures))
    embedded += service.embed((folder / "notes.txt").read_text(), input_type="passage")
    (asked,) = np.array(service.embed("a red flower", input_type="query"))
    wanted = np.array(embedded) @ asked
    printed = re.findall(r"^ +\d+\. +(-?\d\.\d{3})  (.*)$", output, re.MULTILINE)
    assert [float(score) for score, _ in printed] == pytest.approx(sorted(wanted, reverse=True), abs=2e-3)
    by_name = {names: float(score) for score, names in printed}
    assert by_name["below/again.JPG  flower.jpg"] == pytest.approx(float(wanted[1]), abs=2e-3)
    assert by_name["notes.txt"] == pytest.approx(float(wanted[3]), abs=2e-3)
    assert "  “notes of a & b <b>”" in output
    found = json.loads(tessera.search("a red flower", "--json"))
    assert found["scores"] == "cosine" and [each["rank"] for each in found["results"]] == [1, 2, 3, 4]
    (notes,) = (each for each in found["results"] if each["id"] == "notes.txt")
    assert notes["text"] == "notes of a & b <b>" and notes["source"].endswith("pictures/notes.txt")
    assert {"below/again.JPG", "flower.jpg"} in [{each["id"], *each["same_as"]} for each in found["results"]]
    assert "\x1b" not in output
    with Image.open(tessera.cwd / "out.png") as sheet:
        assert sheet.format == "PNG"
        colours = sheet.convert("RGB").getcolors(1 << 24)
    # The photographs are on it, and not frames alone.
    assert colours is not None and len(colours) > 5000
    page = Reader((tessera.cwd / "out.html").read_text())
    assert "script" not in page.tags and "b" not in page.tags
    assert all(address.startswith(("data:image/jpeg;base64,", "file:///")) for address in page.addresses)
    assert (folder / "below" / "again.JPG").as_uri() in page.addresses
    assert NASTY.replace("\x1b", "\ufffd") in page.texts and "notes of a & b <b>" in page.texts
    shown = [text for text in page.texts if re.fullmatch(r"-?\d\.\d{3}", text)]
    assert shown == [score for score, _ in printed]


def test_a_picture_is_most_like_itself(tessera: Command, photos: dict[str, bytes]) -> None:
    (tessera.cwd / "query.jpg").write_bytes(photos["china"])
    first = tessera.search("--image", "query.jpg", "--top", "1")
    assert re.search(r"1\.  1\.000  china\.jpg", first)
    both = tessera.search("with a red flower", "--image", "query.jpg", "--top", "2", "--html", "both.html")
    assert re.search(r"^   2\. ", both, re.MULTILINE)
    page = Reader((tessera.cwd / "both.html").read_text())
    assert (
        "with a red flower" in page.texts and len([*filter(re.compile("data:").match, page.addresses)]) == 3
    )


def test_a_run_tells_what_was_not_embedded_and_forgets_what_is_gone(tessera: Command, tmp_path: Path) -> None:
    here = replace(tessera, cwd=tmp_path)
    service = ("--url", tessera.url, "--progress", "none")

    def embed(*words: str, status: int) -> str:
        process = here.start("embed", *words, "--out", "out", *service)
        output, errors = process.communicate(timeout=180)
        assert process.returncode == status, output + errors
        return output + errors

    def rows(name: str) -> list[tuple[str, str]]:
        table = pq.read_table(tmp_path / "out" / name).to_pylist()
        return sorted((row["id"], row["source"]) for row in table)

    for folder in ("in", "phone"):
        (tmp_path / folder).mkdir()
    for name in ("a.docx", "b.docx"):
        (tmp_path / "phone" / name).touch()
    (tmp_path / "in" / "notes.txt").write_text("notes")
    (tmp_path / "in" / "link.txt").symlink_to("notes.txt")
    (tmp_path / "in" / "fax.tif").write_bytes(several(10, 20, 30))
    (tmp_path / "lines.jsonl").write_text('{"id": "x", "text": "one"}\n{"id": "x", "text": "two"}\n')
    sources = ("in", "phone", "lines.jsonl")
    said = embed(*sources, status=3)
    assert (
        "5 items embedded" in said and "1 failed" in said and "3 files passed over: .docx 2, links 1" in said
    )
    assert rows("errors.parquet") == [("x", "lines.jsonl:2")]
    (tmp_path / "in" / "fax.tif").write_bytes(several(10, 20))
    said = embed(*sources, status=3)
    assert "4 done before, 1 gone and removed, 1 failed" in said
    assert rows("errors.parquet") == [("x", "lines.jsonl:2")]
    left = [(f"in/{name}", "in/" + name.partition("#")[0]) for name in ("fax.tif#page=1", "fax.tif#page=2")]
    left = [*left, ("in/notes.txt", "in/notes.txt"), ("x", "lines.jsonl:1")]
    assert rows("vectors") == left
    for words in (("phone", "--dry-run"), ("phone",)):
        said = embed(*words, status=1)
        assert "2 files passed over: .docx 2" in said and "nothing to embed was found" in said
    assert rows("vectors") == left and rows("errors.parquet") == [("x", "lines.jsonl:2")]


def test_what_is_not_there_is_not_shown(tessera: Command) -> None:
    notes = tessera.cwd / "pictures" / "notes.txt"
    kept = notes.read_bytes()
    notes.unlink()
    try:
        process = tessera.start("search", "vectors", "notes", "--url", tessera.url, "--json", "--top", "3")
        output, errors = process.communicate(timeout=180)
    finally:
        notes.write_bytes(kept)
    assert process.returncode == 0, errors
    found = json.loads(output)["results"]
    assert len(found) == 3 and "notes.txt" not in {each["id"] for each in found}
    elsewhere = tessera.cwd / "elsewhere"
    elsewhere.mkdir()
    process = replace(tessera, cwd=elsewhere).start("search", "../vectors", "notes", "--url", tessera.url)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0 and "none of the files is here" in errors and "notes.txt" in output


def test_mistakes_are_said_in_a_line(tessera: Command) -> None:
    """One after another, since each costs the start of an interpreter."""
    assert "not an URL" in tessera.run("search", "vectors", "a", "--url", "http://localhost:80x0", status=1)
    assert "TESSERA_API_KEY" in tessera.search("a", status=1, TESSERA_API_KEY="sk-unknown-0123456")
    assert "--url names none" in tessera.run("search", "vectors", "a", "--rerank", status=1)
    (tessera.cwd / "torn.jpg").write_bytes(b"\xff\xd8\xff torn")
    assert "cannot be embedded" in tessera.search("--image", "torn.jpg", status=1)
    assert "No such file" in tessera.search("--image", "gone.jpg", status=1)
    assert "in quotes: tessera search vectors 'a red flower'" in tessera.search(
        "a", "red", "flower", status=2
    )
    assert "cannot be written" in tessera.search("a flower", "--sheet", "gone/x.png", status=1)
    unread = tessera.start("search", "vectors", "a flower", "--url", tessera.url)
    assert unread.stdout is not None
    unread.stdout.close()
    unread.stdout = None
    assert "Pipe" not in unread.communicate(timeout=180)[1]
    assert unread.returncode == 128 + signal.SIGPIPE
