"""``examples/search.py`` as a user runs it, against a running service."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, ROOT, free_ports
from tests.families.dual_encoder import install
from tests.families.token_rows import make_checkpoint
from tests.frontend.alone import frontend
from tests.test_imaging import png_of_size

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]

INDEX = ".tessera-search.sqlite"
NASTY = "<script>document.title='x'<script> & \" \x1b[31m.png"


@dataclass(frozen=True, slots=True)
class Search:
    """The example with a service to ask, in a directory of its own."""

    cwd: Path
    environment: dict[str, str]

    def start(self, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "search.py"), *map(str, arguments)],
            cwd=self.cwd,
            env=os.environ | self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str | Path, status: int = 0, **environment: str) -> str:
        """What it printed on standard output, or on standard error when it was to fail."""
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == status, output + errors
        assert "Traceback" not in errors
        return errors if status else output


@pytest.fixture
def search(service: Disaggregated, tmp_path: Path) -> Search:
    environment = {"TESSERA_URL": service.url, "TESSERA_API_KEY": service.key}
    return Search(tmp_path, environment)


@pytest.fixture
def folder(tmp_path: Path, photos: dict[str, bytes]) -> Path:
    """Three pictures, a copy of one of them in a folder below, and what is no picture."""
    made = tmp_path / "pictures"
    (made / "below").mkdir(parents=True)
    (made / ".hidden").mkdir()
    for name, data in photos.items():
        (made / f"{name}.jpg").write_bytes(data)
    (made / "below" / "again.JPG").write_bytes(photos["flower"])
    (made / ".hidden" / "not.jpg").write_bytes(photos["flower"])
    Image.new("RGBA", (90, 60), (200, 30, 30, 128)).save(made / NASTY)
    (made / "notes.txt").write_text("no picture")
    return made


def embedding_requests(service: Disaggregated) -> float:
    text = httpx.get(f"{service.url}/metrics", headers={"authorization": f"Bearer {service.key}"}).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tessera_requests_total" and sample.labels["route"] == "/v1/embeddings"
    )


def vectors(index: Path) -> dict[bytes, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """The vectors in an index by the name of a file that they are of."""
    with sqlite3.connect(index) as database:
        rows = database.execute("SELECT path, vector FROM files JOIN vectors USING (digest)").fetchall()
    database.close()
    return {os.path.basename(path): np.frombuffer(vector, "<f4") for path, vector in rows}


def test_indexing_and_what_it_costs_the_second_time(
    search: Search, folder: Path, service: Disaggregated, photos: dict[str, bytes]
) -> None:
    (folder / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    (folder / "wide.png").write_bytes(png_of_size(11_000, 10_000))
    process = search.start("index", folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert "6 pictures, 3 of them new" in output
    assert re.search(r"not indexed: .*torn\.png: is .*image", output)
    assert re.search(r"not indexed: .*wide\.png: the image has 11000x10000 pixels", output)
    assert "embedding: 100%" in errors
    held = vectors(folder / INDEX)
    assert set(held) == {b"china.jpg", b"flower.jpg", b"again.JPG", NASTY.encode()}
    china, flower = service.embed(*(parts(None, photos[name]) for name in ("china", "flower")))
    np.testing.assert_allclose(held[b"china.jpg"], china, atol=1e-4)
    np.testing.assert_allclose(held[b"again.JPG"], flower, atol=1e-4)
    # A file that was renamed is known by its content, and one that is gone is forgotten.
    (folder / "torn.png").unlink()
    (folder / "wide.png").unlink()
    (folder / "china.jpg").rename(folder / "renamed.jpg")
    before = embedding_requests(service)
    assert "4 pictures, 0 of them new" in search.run("index", folder)
    assert embedding_requests(service) == before
    assert set(vectors(folder / INDEX)) == {b"renamed.jpg", b"flower.jpg", b"again.JPG", NASTY.encode()}
    # Another index asks again, and the service has every picture in its cache.
    again = search.run("index", folder, "--index", "other.sqlite")
    tokens = re.search(r"([\d,]+) tokens embedded, ([\d,]+) of them from the service's cache", again)
    assert tokens is not None
    assert tokens[2] != "0"


def test_it_goes_on_where_it_was_stopped(search: Search, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(60):
        Image.new("RGB", (64, 64), (4 * number, 90, 200)).save(many / f"{number:02}.png")
    process = search.start("index", many, "--batch", "1", "--concurrency", "1")
    try:
        deadline = time.monotonic() + 60
        while not (many / INDEX).exists() or count(many / INDEX) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command goes on" in errors and "Traceback" not in errors
    done = count(many / INDEX)
    assert 3 <= done < 60
    assert f"60 pictures, {60 - done} of them new" in search.run("index", many)
    assert count(many / INDEX) == 60


def count(index: Path) -> int:
    database = sqlite3.connect(index)
    try:
        return int(database.execute("SELECT count(*) FROM vectors").fetchone()[0])
    except sqlite3.OperationalError:
        # It has been made and holds no table yet.
        return 0
    finally:
        database.close()


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


def test_a_text_ranks_the_pictures(
    search: Search, folder: Path, service: Disaggregated, photos: dict[str, bytes]
) -> None:
    search.run("index", folder)
    output = search.run("query", folder, "a red flower", "--sheet", "out.png", "--html", "out.html")
    pictures = [photos["china"], photos["flower"], (folder / NASTY).read_bytes()]
    embedded = np.array(service.embed(*(parts(None, data) for data in pictures)))
    (asked,) = np.array(service.embed("a red flower", input_type="query"))
    printed = re.findall(r"^ +\d+\. +(-?\d\.\d{3})  (.*)$", output, re.MULTILINE)
    assert [float(score) for score, _ in printed] == pytest.approx(
        sorted(embedded @ asked, reverse=True), abs=2e-3
    )
    by_name = {paths: float(score) for score, paths in printed}
    flower = "pictures/below/again.JPG  pictures/flower.jpg"
    assert by_name[flower] == pytest.approx(float(embedded[1] @ asked), abs=2e-3)
    assert "\x1b" not in output
    with Image.open(search.cwd / "out.png") as sheet:
        assert sheet.format == "PNG"
        colours = sheet.convert("RGB").getcolors(1 << 24)
    # The photographs are on it, and not frames alone.
    assert colours is not None and len(colours) > 5000
    page = Reader((search.cwd / "out.html").read_text())
    assert "script" not in page.tags
    assert all(address.startswith(("data:image/jpeg;base64,", "file:///")) for address in page.addresses)
    assert NASTY.replace("\x1b", "\ufffd") in page.texts
    shown = [text for text in page.texts if re.fullmatch(r"-?\d\.\d{3}", text)]
    assert shown == [score for score, _ in printed]


def test_a_picture_is_most_like_itself(
    search: Search, folder: Path, tmp_path: Path, photos: dict[str, bytes]
) -> None:
    search.run("index", folder)
    query = tmp_path / "query.jpg"
    query.write_bytes(photos["china"])
    first = search.run("query", folder, "--image", query, "--top", "1")
    assert re.search(r"1\.  1\.000  pictures/china\.jpg", first)
    both = search.run("query", folder, "with a red flower", "--image", query, "--top", "2")
    assert both.startswith("“with a red flower” + ")
    assert re.search(r"^   2\. ", both, re.MULTILINE)


def test_two_folders_may_share_an_index(search: Search, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "pictures-too"
    other.mkdir()
    shutil.copy(folder / "china.jpg", other / "other.jpg")
    for each in (folder, other):
        search.run("index", each, "--index", "shared.sqlite")
    output = search.run("query", other, "a temple", "--index", "shared.sqlite")
    assert re.findall(r"\d\.\d{3}  (.*)", output) == ["pictures-too/other.jpg"]
    (other / "other.jpg").unlink()
    said = search.run("query", tmp_path / ".", "a temple", "--index", "shared.sqlite")
    assert "pictures/china.jpg" in said


def test_a_model_of_token_vectors_is_refused_by_name(search: Search, folder: Path, tmp_path: Path) -> None:
    path = install(tmp_path / "site", "tests.families.token_rows")
    checkpoint = make_checkpoint(tmp_path / "model", 1)
    with frontend(checkpoint, tmp_path, environment={"PYTHONPATH": path}) as client:
        said = search.run("index", folder, "--url", str(client.base_url), status=1)
    assert f"serves {MODEL}, which gives tokens" in said


def test_mistakes_are_said_in_a_line(search: Search, folder: Path, tmp_path: Path) -> None:
    """One after another, since each costs the start of an interpreter."""
    (tmp_path / "empty").mkdir()
    (port,) = free_ports(1)
    search_folder = ("query", folder, "a flower")
    assert "no such folder" in search.run("index", "nowhere", status=1)
    assert "no picture in it" in search.run("index", "empty", status=1)
    assert "there is no index yet" in search.run(*search_folder, status=1)
    assert "give a text" in search.run("query", folder, status=1)
    refused = search.run("index", folder, "--url", f"http://127.0.0.1:{port}", status=1)
    assert f"no answer from http://127.0.0.1:{port}" in refused and "tessera serve" in refused
    assert "TESSERA_API_KEY" in search.run("index", folder, status=1, TESSERA_API_KEY="sk-unknown-0123456")
    assert "not an URL" in search.run("index", folder, "--url", "http://localhost:80x0", status=1)
    search.run("index", folder)
    unread = search.start(*search_folder)
    assert unread.stdout is not None
    unread.stdout.close()
    unread.stdout = None
    assert "Pipe" not in unread.communicate(timeout=120)[1]
    assert unread.returncode == 128 + signal.SIGPIPE
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff torn")
    assert "cannot embed the query" in search.run("query", folder, "--image", "torn.jpg", status=1)
    assert "No such file" in search.run("query", folder, "--image", "gone.jpg", status=1)
    assert "cannot be written" in search.run(*search_folder, "--sheet", "gone/x.png", status=1)
    with sqlite3.connect(folder / INDEX) as database:
        database.execute("UPDATE vectors SET model = 'another-model 0123'")
    database.close()
    other = search.run(*search_folder, status=1)
    assert "another-model" in other and "run the index command again" in other
    (folder / INDEX).write_bytes(b"not a database at all" * 99)
    assert "--index names another" in search.run(*search_folder, status=1)
