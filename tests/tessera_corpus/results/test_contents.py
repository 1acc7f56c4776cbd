"""What is read again of an output's places, and small pictures of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from tessera.local.content import ImageFile
from tessera_corpus.item import Failure, Item, Origin
from tessera_corpus.results.contents import Contents
from tessera_corpus.results.entry import entry_of
from tessera_corpus.results.thumbnail import SIDE, Thumbnails
from tessera_corpus.search import Hit
from tessera_corpus.sources.settings import ReadSettings
from tests.imaging.test_file import png_of_size
from tests.tessera_corpus.output.made import write_lance
from tests.tessera_corpus.pdf_files import line, pdf

pytestmark = [pytest.mark.starts, pytest.mark.xdist_group("results")]


@pytest.fixture(scope="module")
def thumbnails() -> Iterator[Thumbnails]:
    made = Thumbnails()
    yield made
    made.close()


def at(source: Path, id: str, page: int | None = None, *, row: int | None = None) -> Origin:
    return Origin(id=id, source=str(source) if row is None else f"{source}:{row}", page=page)


def read(place: Origin, **settings: Path) -> Item | Failure:
    with Contents(ReadSettings(**settings)) as contents:
        return contents.read(place)


def jpeg(colour: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "JPEG")
    return file.getvalue()


def texts_of(item: Item | Failure) -> tuple[object, ...]:
    assert isinstance(item, Item), item
    return tuple(part for part in item.parts if isinstance(part, str))


def pictures_of(item: Item | Failure) -> list[bytes]:
    assert isinstance(item, Item), item
    return [part.data for part in item.parts if isinstance(part, ImageFile)]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.JPG").write_bytes(jpeg("red"))
    assert texts_of(read(at(tmp_path / "a.txt", "a.txt"))) == ("a text",)
    assert pictures_of(read(at(tmp_path / "b.JPG", "b.JPG"))) == [jpeg("red")]
    gone = read(at(tmp_path / "gone.txt", "gone.txt"))
    assert isinstance(gone, Failure) and gone.reason == "No such file or directory"
    other = read(at(tmp_path / "a.sh", "a.sh"))
    assert isinstance(other, Failure) and "cannot be read again" in other.reason


def test_one_page_of_a_document(tmp_path: Path, thumbnails: Thumbnails) -> None:
    file = tmp_path / "d.pdf"
    file.write_bytes(pdf([line("one"), line("two", size=40), line("three")]))
    found = read(at(file, "below/d.pdf#page=2", 2))
    (png,) = pictures_of(found)
    small = thumbnails.make(png, source="page")
    with Image.open(BytesIO(png)) as drawn:
        wanted = ImageOps.contain(drawn.convert("RGB"), (SIDE, SIDE))
    assert isinstance(small, Image.Image) and small.tobytes() == wanted.tobytes()
    missing = read(at(file, "below/d.pdf#page=7", 7))
    assert isinstance(missing, Failure) and missing.reason == "it is not there any more"


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "p.jpg").write_bytes(jpeg("blue"))
    (tmp_path / "d.pdf").write_bytes(pdf([line("one")]))
    batch = {"model": "any", "dimensions": 3, "input": ["first", "second"]}
    lines = [
        {"id": "a", "text": "x" * 3_000_000},
        {"id": "b", "text": "beside", "image": "p.jpg"},
        {"text": "no id"},
        {"id": "d", "image": "d.pdf"},
        {"custom_id": "e", "url": "/v1/embeddings", "method": "POST", "body": batch},
    ]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in lines))
    assert len(str(texts_of(read(at(file, "a", row=1)))[0])) == 3_000_000
    both = read(at(file, "b", row=2), root=tmp_path)
    assert texts_of(both) == ("beside",) and pictures_of(both) == [jpeg("blue")]
    assert texts_of(read(at(file, f"{file}:3", row=3))) == ("no id",)
    assert len(pictures_of(read(at(file, "d#page=1", 1, row=4), root=tmp_path))) == 1
    # Whatever the run did: nothing is embedded here.
    with Contents(ReadSettings()) as contents:
        rows = [contents.read(at(file, f"e#{number}", row=5)) for number in range(2)]
    assert [texts_of(row) for row in rows] == [("first",), ("second",)]
    outside = read(at(file, "b", row=2))
    assert isinstance(outside, Failure) and "--root" in outside.reason
    behind = read(at(file, "z", row=99))
    assert isinstance(behind, Failure) and behind.reason == "it is not there any more"


@pytest.mark.parametrize("format", ["parquet", "lance"])
def test_rows_of_tables(tmp_path: Path, format: str) -> None:
    table = pa.table(
        {
            "id": [f"id-{number}" for number in range(200)],
            "text": [f"text {number}" for number in range(200)],
            "image": [None] * 199 + [jpeg("green")],
        },
        schema=pa.schema([("id", pa.string()), ("text", pa.string()), ("image", pa.binary())]),
    )
    path = tmp_path / f"t.{format}"
    if format == "lance":
        write_lance(table, path)
    else:
        pq.write_table(table, path, row_group_size=50)
    assert texts_of(read(at(path, "id-120", row=120))) == ("text 120",)
    assert pictures_of(read(at(path, "id-199", row=199))) == [jpeg("green")]
    behind = read(at(path, "id-200", row=200))
    assert isinstance(behind, Failure) and behind.reason == "it is not there any more"


def test_small_pictures(thumbnails: Thumbnails) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (300, 900, 4), dtype=np.uint8)
    file = BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(noise).save(file, "PNG", exif=turned)
    made = thumbnails.make(file.getvalue(), source="a")
    assert isinstance(made, Image.Image) and made.mode == "RGB"
    layer = Image.fromarray(noise).transpose(Image.Transpose.ROTATE_270)
    flat = Image.new("RGB", layer.size, "white")
    flat.paste(layer, mask=layer.getchannel("A"))
    assert made.tobytes() == ImageOps.contain(flat, (SIDE, SIDE)).tobytes()
    # A small one stays as it is.
    small = thumbnails.make(jpeg("red"), source="b")
    assert isinstance(small, Image.Image) and small.size == (40, 30)


def test_what_is_no_picture_is_said(thumbnails: Thumbnails) -> None:
    assert "is no image" in str(thumbnails.make(b"no picture", source="a"))
    assert "has 400000000 pixels" in str(thumbnails.make(png_of_size(20_000, 20_000), source="b"))
    assert isinstance(thumbnails.make(jpeg("red"), source="c"), Image.Image)


def test_entries_say_what_is_to_know(tmp_path: Path, thumbnails: Thumbnails) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\x1b[31m\n two " + "x" * 1000)
    place = at(file, "a\x07.txt")
    item = read(place)
    assert isinstance(item, Item)
    same = entry_of(Hit(score=0.5, content_hash=item.content_hash, places=(place, place)), item, thumbnails)
    assert same.text.startswith("one\ufffd[31m two xxx") and same.text.endswith("x…")
    assert (same.name, same.note, len(same.others)) == ("a\ufffd.txt", "", 1)
    other = entry_of(Hit(score=0.5, content_hash=b"x", places=(place,)), item, thumbnails)
    assert other.note == "changed since it was embedded"
    gone = item.failed("gone")
    assert entry_of(Hit(score=0.5, content_hash=b"x", places=(place,)), gone, thumbnails).note == "gone"
