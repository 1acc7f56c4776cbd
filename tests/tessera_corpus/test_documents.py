"""Pages of PDF files, drawn by real renderers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import mmap
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pypdfium2
import pytest
from benchmarks.proc import children
from PIL import Image

from tessera import imaging
from tessera.local.content import ImageFile
from tessera.sandbox import Limits, in_memory
from tessera_corpus.documents import Documents, DocumentSettings
from tessera_corpus.item import Document, Failure, Item
from tessera_corpus.pdf import Drawing as PageDrawing
from tessera_corpus.pdf import Drawn, Known, PdfMode, PictureFormat, Refusal, Renderers, Task, Trait
from tessera_corpus.words import Words
from tests.tessera_corpus.pdf_files import endless, image, line, pdf, stream, unembedded
from tests.waiting import wait_until

pytestmark = pytest.mark.confines

BASE = DocumentSettings(processes=2, seconds=60.0, max_pages=3000, max_pixels=4_000_000)


@dataclass
class Drawing:
    """Renderers, and the process that forks them."""

    documents: Documents
    server: int

    def rows(
        self, *files: bytes | Item | Failure, done: Callable[[str, bytes], bool] = lambda page, content: False
    ) -> list[Item | Failure]:
        return list(self.documents.pages(iter(given(files)), done))


def given(files: Iterable[bytes | Item | Failure]) -> Iterator[Item | Document | Failure]:
    for number, file in enumerate(files):
        if isinstance(file, bytes):
            yield Document(id=f"{number}.pdf", source=f"/files/{number}.pdf", data=file)
        else:
            yield file


def start(settings: DocumentSettings, picture_format: PictureFormat = PictureFormat.BMP) -> Drawing:
    before = set(children(os.getpid()))
    documents = Documents(settings, picture_format)
    assert list(documents.pages(given([b"no PDF"]), lambda page, content: False))
    (server,) = set(children(os.getpid())) - before
    return Drawing(documents, server)


@pytest.fixture(scope="module")
def drawing() -> Iterator[Drawing]:
    """Renderers that draw pictures, and that tests leave as they are."""
    found = start(BASE)
    yield found
    found.documents.close()


@pytest.fixture(scope="module")
def both() -> Iterator[Drawing]:
    found = start(msgspec.structs.replace(BASE, mode=PdfMode.BOTH), PictureFormat.PNG)
    yield found
    found.documents.close()


Make = Callable[..., Drawing]


@pytest.fixture
def make() -> Iterator[Make]:
    """Renderers of a test's own; afterwards no descriptor is left."""
    # What earlier tests left is not to be closed in between, and matplotlib keeps the fonts that it opens.
    gc.collect()
    figures(2)
    descriptors = len(os.listdir("/proc/self/fd"))
    made: list[Drawing] = []

    def make(**settings: object) -> Drawing:
        made.append(start(msgspec.structs.replace(BASE, **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for found in made:
        found.documents.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def pixels(row: Item | Failure) -> np.ndarray:
    assert isinstance(row, Item), row
    picture = row.parts[0]
    assert isinstance(picture, ImageFile)
    return np.asarray(imaging.decode(picture.data, param="page"))


def plainly(data: bytes, page: int, dpi: int = 150) -> np.ndarray:
    with pypdfium2.PdfDocument(data) as document:
        return np.asarray(document[page - 1].render(scale=dpi / 72).to_pil().convert("RGB"))


@functools.cache
def figures(count: int) -> bytes:
    # A second, in the processes alone that need it and not in each that collects the tests.
    import matplotlib
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    matplotlib.use("agg")
    file = io.BytesIO()
    with PdfPages(file) as out:
        for number in range(count):
            figure = Figure((4, 5))
            axes = figure.subplots()
            axes.plot(np.arange(40) ** (1 + number))
            axes.set_title(f"Figure {number}")
            out.savefig(figure)
    return file.getvalue()


def scanned() -> bytes:
    random = np.random.default_rng(1)
    page = Image.fromarray(random.integers(0, 256, (300, 220, 3), dtype=np.uint8)).resize((440, 600))
    file = io.BytesIO()
    page.save(file, "PDF", resolution=100)
    return file.getvalue()


FILES: dict[str, bytes] = {
    "text": pdf([line("first"), line("second")]),
    "rotated": pdf([line("turned")], page="/Rotate 90"),
    "cropped": pdf([line("cut")], page="/CropBox[10 10 120.5 90.25]"),
    "off centre": pdf([line("moved", y=-50)], box="-30 -90 99.5 40"),
    "image": pdf(
        ["150 0 0 100 20 20 cm /X Do"],
        resources="/XObject<</X 10 0 R>>",
        objects=[image(2, 1, b"\xff\0\0\0\0\xff")],
    ),
    "inverted boxes": pdf([line("box")], box="200 150 0 0"),
    "no box": pdf([line("letter")], box=""),
    "one pixel": pdf([""], box="0 0 .3 .3"),
    "encrypted for all": pdf([line("open")], password=b""),
}


@pytest.mark.parametrize("name", [*FILES, "figures", "scanned"])
def test_a_page_has_the_pixels_that_pdfium_draws(drawing: Drawing, both: Drawing, name: str) -> None:
    data = figures(2) if name == "figures" else scanned() if name == "scanned" else FILES[name]
    pictures, pages = drawing.rows(data), both.rows(data)
    for number, (picture, page) in enumerate(zip(pictures, pages, strict=True), 1):
        expected = plainly(data, number)
        np.testing.assert_array_equal(pixels(picture), expected)
        # As another file, and beside its text.
        np.testing.assert_array_equal(pixels(page), expected)


def test_ids_and_hashes_are_of_file_page_and_drawing(drawing: Drawing, both: Drawing, make: Make) -> None:
    data, other = FILES["text"], figures(2)
    rows = drawing.rows(data, data, other)
    assert [(row.id, row.source, row.page) for row in rows] == [
        (f"{file}.pdf#page={page}", f"/files/{file}.pdf", page) for file in (0, 1, 2) for page in (1, 2)
    ]
    hashes = [row.content_hash for row in rows if isinstance(row, Item)]
    assert hashes[:2] == hashes[2:4] and len(set(hashes)) == 4
    for changed in (both, make(dpi=72), make(mode=PdfMode.TEXT)):
        assert {row.content_hash for row in changed.rows(data) if isinstance(row, Item)}.isdisjoint(hashes)


def test_the_hash_does_not_tell_in_which_format_a_page_is_handed_on(drawing: Drawing) -> None:
    found = start(BASE, PictureFormat.PNG)
    try:
        data = scanned()
        bmp, png = (each.rows(data)[0] for each in (drawing, found))
    finally:
        found.documents.close()
    assert isinstance(bmp, Item) and isinstance(png, Item)
    assert bmp.content_hash == png.content_hash
    files = [part.data for row in (bmp, png) for part in row.parts if isinstance(part, ImageFile)]
    assert files[0][:2] == b"BM" and files[1][:4] == b"\x89PNG"
    np.testing.assert_array_equal(pixels(bmp), pixels(png))


def test_text_follows_its_picture(both: Drawing) -> None:
    first, empty = both.rows(pdf([line("one two", y=120) + line("three", y=60), "0 0 9 9 re f"]))
    assert isinstance(first, Item) and isinstance(empty, Item)
    picture, text = first.parts
    assert isinstance(picture, ImageFile) and text == "one two\nthree"
    (alone,) = empty.parts
    assert isinstance(alone, ImageFile)


def test_text_alone(make: Make) -> None:
    texts = make(mode=PdfMode.TEXT)
    ligatures = pdf([line("\\344 \\200"), "", line("outside", x=900)])
    first, empty, outside = texts.rows(ligatures)
    assert isinstance(first, Item) and len(first.parts) == 1 and isinstance(first.parts[0], str)
    assert empty == Failure(id="0.pdf#page=2", source="/files/0.pdf", page=2, reason="the page has no text")
    assert isinstance(outside, Failure)


def test_items_and_failures_pass_in_order(drawing: Drawing) -> None:
    item = Item(id="a", source="a", parts=("text",))
    failure = Failure(id="b", source="b", reason="bad")
    rows = drawing.rows(item, FILES["text"], failure, item, FILES["rotated"], b"", item)
    assert [row.id for row in rows] == [
        *("a", "1.pdf#page=1", "1.pdf#page=2", "b", "a", "4.pdf#page=1", "5.pdf", "a")
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"no PDF at all", "no PDF file"),
        (FILES["text"][:300], "no PDF file"),
        (pdf([]), "without pages"),
        (pdf([line("secret")], password=b"word"), "a password is needed"),
        (pdf([""] * 3001), "3001 pages, the limit is 3000"),
    ],
    ids=["empty", "other", "truncated", "no pages", "encrypted", "pages"],
)
def test_a_bad_file_is_one_failure(drawing: Drawing, data: bytes, reason: str) -> None:
    good = FILES["text"]
    before, failure, *after = drawing.rows(FILES["rotated"], data, good)
    assert isinstance(before, Item) and len(after) == 2
    assert isinstance(failure, Failure) and reason in failure.reason
    assert (failure.id, failure.source, failure.page) == ("1.pdf", "/files/1.pdf", None)


def test_a_file_of_too_many_bytes_is_not_read(make: Make) -> None:
    small = make(max_bytes=1000)
    (failure,) = small.rows(figures(1))
    assert isinstance(failure, Failure) and failure.reason == "more than 1000 bytes"


@pytest.mark.parametrize(
    "box", ["0 0 14400 14400", "0 0 2147483647 2147483647", "0 0 99999999 1", "0 0 .01 99999999"]
)
def test_a_page_of_absurd_size_is_not_drawn(both: Drawing, box: str) -> None:
    data = pdf([line("a")]).replace(b"0 0 200 150", box.encode())
    (row,) = both.rows(data)
    assert isinstance(row, Failure) and row.page == 1 and "the limit is 4000000 pixels" in row.reason


def test_thousands_of_pages(make: Make) -> None:
    texts = make(mode=PdfMode.TEXT, max_pages=5000)
    rows = texts.rows(pdf([line(f"page {number}") for number in range(1, 2501)]))
    assert [row.parts[0] for row in rows if isinstance(row, Item)] == [f"page {n}" for n in range(1, 2501)]


def test_pages_that_are_done_are_not_drawn(drawing: Drawing) -> None:
    data = figures(4)
    pages = {row.id: row.content_hash for row in drawing.rows(data) if isinstance(row, Item)}
    assert len(pages) == 4
    for left in ([], ["0.pdf#page=1"], ["0.pdf#page=3"], list(pages)):
        rows = drawing.rows(
            data, done=lambda page, content, left=left: page not in left and content in pages.values()
        )
        assert [row.id for row in rows] == left


@pytest.mark.parametrize(
    "catalog",
    [
        "/OpenAction<</S/JavaScript/JS(while(true){})>>",
        "/OpenAction<</S/Launch/F(/bin/sh)>>",
        "/OpenAction<</S/URI/URI(http://127.0.0.1/)>>",
        "/AcroForm<</XFA 10 0 R>>",
    ],
)
def test_actions_of_a_file_do_not_run(drawing: Drawing, catalog: str) -> None:
    (row,) = drawing.rows(pdf([line("calm")], catalog=catalog, objects=[b"null"]))
    np.testing.assert_array_equal(pixels(row), plainly(pdf([line("calm")]), 1))


def test_content_elsewhere_is_not_read(make: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(line("secret"))
    data = pdf([line("own")], objects=[f"<</Length 0/F({secret})>>\nstream\n\nendstream".encode()])
    data = data.replace(b"/Contents 12 0 R", b"/Contents 10 0 R")
    (row,) = make(mode=PdfMode.TEXT).rows(data)
    assert isinstance(row, Failure)


def renderers(drawing: Drawing) -> set[int]:
    return set(children(drawing.server))


def busy(drawing: Drawing) -> int:
    """The first renderer that works, by its processor time."""

    def ticks(pid: int) -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    def working() -> list[int]:
        return [pid for pid in renderers(drawing) if ticks(pid) > 30]

    return wait_until(working, despite=OSError)[0]


def test_a_page_that_holds_its_renderer_is_one_failure(make: Make) -> None:
    # The others are drawn in this time also where the machine is busy.
    held = make(seconds=1.0)
    before, failure, *after = held.rows(FILES["rotated"], endless(), FILES["text"])
    assert isinstance(failure, Failure) and failure.page == 1
    assert "not drawn within 1 seconds of processor time" in failure.reason
    assert [isinstance(row, Item) for row in (before, *after)] == [True] * 3


def test_a_killed_renderer_costs_one_page(make: Make) -> None:
    killed = make()
    thread = threading.Thread(target=lambda: os.kill(busy(killed), signal.SIGKILL))
    thread.start()
    rows = killed.rows(endless(), FILES["text"])
    thread.join()
    assert rows[0] == Failure(id="0.pdf#page=1", source="/files/0.pdf", page=1, reason="its renderer crashed")
    assert [isinstance(row, Item) for row in rows[1:]] == [True] * 2


def test_a_stopped_renderer_costs_one_page(make: Make) -> None:
    stopped = make(processes=1, seconds=0.2)
    (pid,) = renderers(stopped)
    os.kill(pid, signal.SIGSTOP)
    # The page that it had is drawn by nobody, how many there are is told by the next.
    first, second = stopped.rows(FILES["text"])
    assert isinstance(first, Failure) and first.page == 1 and "0.2 seconds" in first.reason
    assert isinstance(second, Item)


def test_a_killed_fork_server_is_started_again(make: Make) -> None:
    killed = make()
    os.kill(killed.server, signal.SIGKILL)
    rows = killed.rows(FILES["text"], FILES["text"])
    assert [isinstance(row, Item) for row in rows] == [True] * 4


def test_a_file_that_ends_renderer_after_renderer_is_given_up(make: Make) -> None:
    held = make(seconds=0.6)
    data = endless()
    # A hundred pages, each of which is the endless one.
    kids = b"/Kids[" + b"23 0 R " * 100 + b"]/Count 100"
    data = data.replace(b"/Kids[23 0 R]/Count 1", kids)
    rows = held.rows(data, FILES["text"])
    assert all(isinstance(row, Failure) for row in rows[:-2])
    assert 5 <= len(rows) - 2 < 15
    given_up = [row for row in rows if row.page is None]
    assert len(given_up) == 1 and given_up[0].id == "0.pdf"
    assert isinstance(rows[-1], Item)


def test_who_takes_no_more_leaves_nothing_behind(make: Make) -> None:
    left = make()
    rows = left.documents.pages(iter(given([FILES["text"]] * 50)), lambda page, content: False)
    assert isinstance(next(rows), Item)
    rows.close()  # type: ignore[attr-defined]
    assert len(left.rows(FILES["text"])) == 2


def test_what_waits_is_bounded() -> None:
    taken: list[int] = []

    def rows() -> Iterator[Item | Document | Failure]:
        for number, row in enumerate(given([FILES["text"]] * 100)):
            taken.append(number)
            yield row

    # A page has 391 kB, and four are drawn at a time.
    documents = Documents(BASE, ahead_bytes=1_000_000)
    try:
        found = documents.pages(rows(), lambda page, content: False)
        for _ in range(20):
            next(found)
            time.sleep(0.02)
            assert len(taken) < 20
        assert len(list(found)) == 180
    finally:
        documents.close()


def form(field: str, *, appearances: str = "") -> bytes:
    """A page with a line and a field, whose appearance may be objects 11 (a text) and 12 (a mark)."""
    box = "/Type/XObject/Subtype/Form/BBox[0 0 200 30]/Resources<</Font<</F 3 0 R>>>>"
    objects = [
        f"<</Type/Annot/Subtype/Widget/Rect[20 20 180 50]{field}>>".encode(),
        stream(b"BT /F 18 Tf 2 6 Td (4711 EUR) Tj ET", box),
        stream(b"0 g 2 2 16 16 re f", box),
    ]
    acro = f"/AcroForm<</Fields[10 0 R]/DA(/F 12 Tf 0 g)/DR<</Font<</F 3 0 R>>>>{appearances}>>"
    return pdf([line("Invoice")], page="/Annots[10 0 R]", catalog=acro, objects=objects)


@pytest.mark.parametrize(
    ("field", "appearances", "said"),
    [
        ("/F 4/FT/Tx/T(a)/V(4711 EUR)/AP<</N 11 0 R>>", "", "4711 EUR"),
        ("/F 4/FT/Tx/T(a)/V(4711 EUR)/DA(/F 12 Tf 0 g)", "", "4711 EUR"),
        ("/F 4/FT/Tx/T(a)/V(4711 EUR)/DA(/F 12 Tf 0 g)", "/NeedAppearances true", "4711 EUR"),
        ("/F 4/FT/Tx/T(a)/V(4711 EUR)", "/NeedAppearances true", "4711 EUR"),
        ("/F 4/FT/Btn/T(c)/V/Yes/AS/Yes/AP<</N<</Yes 12 0 R>>>>", "", ""),
        ("/F 4/FT/Btn/T(c)/V/Yes/AS/Yes/MK<</CA(4)>>", "", ""),
        ("/F 4/FT/Ch/Ff 131072/T(c)/V(two)/Opt[(one)(two)]/DA(/F 12 Tf 0 g)", "", "two"),
    ],
    ids=["text", "no appearance", "asked for", "no font", "box", "box without appearance", "choice"],
)
def test_what_a_form_is_filled_in_with_is_drawn_and_read(
    both: Drawing, field: str, appearances: str, said: str
) -> None:
    empty, filled = both.rows(form("/F 4/FT/Tx/T(a)"), form(field, appearances=appearances))
    assert isinstance(empty, Item) and isinstance(filled, Item)
    assert empty.parts[1] == "Invoice" and filled.parts[1] == ("Invoice\n" + said).strip()
    # Below the line, in the field's place.
    before, after = pixels(empty), pixels(filled)
    lower = slice(before.shape[0] // 2, None)
    assert (before[lower] == 255).all() and (after[lower] < 128).any()


@pytest.mark.parametrize(
    "field", ["/F 2/FT/Tx/T(a)/V(4711 EUR)/AP<</N 11 0 R>>", "/F 4/FT/Btn/AS/Off/AP<</N<</Yes 12 0 R>>>>"]
)
def test_a_hidden_field_and_an_empty_box_are_not_shown(both: Drawing, field: str) -> None:
    (page,) = both.rows(form(field))
    assert isinstance(page, Item) and page.parts[1] == "Invoice"
    assert (pixels(page)[150:] == 255).all()


def test_a_form_has_the_fonts_of_the_pages_above(both: Drawing) -> None:
    """PDFium draws fields in beside fonts of the page's own, and finds no others afterwards."""
    own = b"/Resources<</Font<</F 3 0 R>>>>/Annots"
    data = form("/F 4/FT/Tx/T(a)/V(4711 EUR)/AP<</N 11 0 R>>")
    assert own in data
    data = data.replace(own, b"/Annots").replace(
        b"/Pages/Kids", b"/Pages/Resources<</Font<</F 9 0 R>>>>/Kids"
    )
    # Codes that another font has for other letters.
    encoding = b"/Encoding<</Differences[73/A/b/c]>>"
    shifted = b"9 0 obj\n<</Type/Font/Subtype/Type1/BaseFont/Times-Roman%b>>\nendobj\n" % encoding
    data = data.replace(b"10 0 obj", shifted + b"10 0 obj", 1)
    data = data.replace(b"(Invoice)", b"(IJKnvoice)")
    (page,) = both.rows(data)
    assert isinstance(page, Item) and page.parts[1] == "Abcnvoice\n4711 EUR"


LAYER = "/OC /L BDC " + line("secret", y=50) + " EMC"


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        ("0 0 0 0 re W n 0 g 20 20 50 50 re f", "blank, though it has 1 path"),
        ("0 0 0 0 re W n " + line("a") + line("b", y=50), "blank, though it has 2 texts"),
        ("20 0 0 20 20 20 cm /X Do", "blank, though it has 1 picture"),
        ("", None),
        ("1 g 20 20 50 50 re f", None),
        ("0 0 0 0 re W n " + line("  "), None),
        (line("found alone").replace("BT", "BT 3 Tr"), None),
        (line("beyond", y=300), None),
        ("20 0 0 20 20 20 cm /Y Do", None),
        (LAYER, None),
        ("1 w 0 0 m 1 1 l S", None),
    ],
)
def test_a_page_that_comes_out_blank_says_so(drawing: Drawing, content: str, warning: str | None) -> None:
    """Not where it is blank: what is white, to be found alone, beyond the edges or on a hidden layer."""
    broken = stream(
        b"nothing",
        "/Type/XObject/Subtype/Image/Width 2/Height 2/ColorSpace/DeviceRGB/BitsPerComponent 8"
        "/Filter/JPXDecode",
    )
    data = pdf(
        [content],
        catalog="/OCProperties<</OCGs[12 0 R]/D<</OFF[12 0 R]>>>>",
        resources="/Properties<</L 12 0 R>>/XObject<</X 10 0 R/Y 11 0 R>>",
        objects=[broken, image(2, 2, bytes([255]) * 12), b"<</Type/OCG/Name(layer)>>"],
    )
    (page,) = drawing.rows(data)
    assert isinstance(page, Item) and page.warning == warning


@pytest.mark.parametrize("later", [False, True], ids=["last", "before others"])
def test_the_catalog_is_found_in_streams_of_objects(tmp_path: Path, later: bool) -> None:
    """Where it is among others, and where the file tells its number in a stream of cross-references."""
    catalog = zlib.compress(b"1 0 <</Type/Catalog/OCProperties<<>>>>")
    other = zlib.compress(b"5 0 <</Type/Page/Catalogue(no)>>")
    packed = [(other, 1), (catalog, 1)]
    if later:
        packed.reverse()
    objects = b"".join(
        b"%d 0 obj\n" % number
        + stream(data, f"/Type/ObjStm/N {count}/First 4/Filter/FlateDecode")
        + b"\nendobj\n"
        for number, (data, count) in enumerate(packed, 11)
    )
    table = b"20 0 obj\n" + stream(b"", "/Type/XRef/Root 1 0 R") + b"\nendobj\n"
    for named, found in (
        (objects, True),
        (objects.replace(catalog, zlib.compress(b"1 0 <</Type/Catalog>>")), False),
    ):
        file = tmp_path / f"{found}.pdf"
        file.write_bytes(b"%PDF-1.5\n" + named + table)
        assert words_of(file).catalog_may_have(b"/OCProperties") is found


LAYERED = "/OCProperties<<>>"


def updated(data: bytes, catalog: str, *, table: bool = True) -> bytes:
    """A file with another catalog at its end, by a table or by a stream of cross-references."""
    start = data.rindex(b"startxref")
    before = re.match(rb"startxref\s+(\d+)", data[start:])
    assert before is not None
    out = bytearray(data)
    place = len(out)
    if table:
        out += f"1 0 obj\n<</Type/Catalog/Pages 2 0 R {catalog}>>\nendobj\n".encode()
        at = len(out)
        out += b"xref\n0 1\n0000000000 65535 f \n1 1\n%010d 00000 n \n" % place
        out += b"trailer\n<</Size 99/Root 1 0 R/Prev %b>>\n" % before[1]
    else:
        packed = zlib.compress(f"1 0 <</Type/Catalog/Pages 2 0 R {catalog}>>".encode())
        objects = stream(packed, "/Type/ObjStm/N 1/First 4/Filter/FlateDecode")
        out += b"98 0 obj\n" + objects + b"\nendobj\n"
        at = len(out)
        entries = b"\x02\0\0\x62\0" + b"\x01" + place.to_bytes(3, "big") + b"\0"
        places = b"/Type/XRef/W[1 3 1]/Index[1 1 98 1]/Size 100/Root 1 0 R/Prev " + before[1]
        out += b"99 0 obj\n" + stream(entries, places.decode()) + b"\nendobj\n"
    return bytes(out) + b"startxref\n%d\n%%%%EOF\n" % at


PLAIN = pdf([line("a")])
BESIDE = pdf([line("a")], objects=[f"<<{LAYERED}>>".encode()])


CATALOGS = {
    "without": (PLAIN, False),
    "with": (pdf([line("a")], catalog=LAYERED), True),
    "the word elsewhere": (BESIDE, False),
    "added": (updated(PLAIN, LAYERED), True),
    "removed": (updated(pdf([line("a")], catalog=LAYERED), ""), False),
    "added and removed": (updated(updated(PLAIN, LAYERED), "/Lang(en)"), False),
    "added in a stream": (updated(PLAIN, LAYERED, table=False), True),
    # Where no table can be believed, the word is looked for everywhere.
    "no table there": (re.sub(rb"startxref\n\d+", b"startxref\n9", BESIDE), True),
    "beyond the end": (re.sub(rb"startxref\n\d+", b"startxref\n9999999999", BESIDE), True),
    "another object there": (BESIDE.replace(b"1 0 obj", b"7 0 obj", 1), True),
    "no start": (BESIDE.replace(b"startxref", b"startxxxx"), True),
    "no trailer": (BESIDE.replace(b"trailer", b"tailer!"), True),
    "tables and streams": (BESIDE.replace(b"/Root 1 0 R", b"/Root 1 0 R/XRefStm 9"), True),
}


@pytest.mark.parametrize("kind", CATALOGS)
def test_the_catalog_is_found_by_tables_of_cross_references(tmp_path: Path, kind: str) -> None:
    """The newest one, of which alone a word counts."""
    data, found = CATALOGS[kind]
    file = tmp_path / "a.pdf"
    file.write_bytes(data)
    assert words_of(file).catalog_may_have(b"/OCProperties") is found


def test_tables_that_name_each_other_end(tmp_path: Path) -> None:
    table = PLAIN.rindex(b"xref\n0 1")
    file = tmp_path / "a.pdf"
    file.write_bytes(PLAIN.replace(b"/Root 1 0 R", b"/Root 77 0 R/Prev %d" % table))
    assert words_of(file).catalog_may_have(b"/OCProperties") is False


FILE_SPEC = "<</Type/Filespec/F(a.txt)/EF<</F 11 0 R>>>>"


@pytest.mark.parametrize(
    ("catalog", "warning"),
    [
        (
            "/AcroForm<</XFA 12 0 R/Fields[]>>/NeedsRendering true",
            "stands for a form in XFA, which is not shown",
        ),
        ("/AcroForm<</XFA 12 0 R/Fields[]>>", None),
        (
            "/Names<</EmbeddedFiles<</Names[(a)10 0 R]>>>>/Collection<<>>",
            "stands for 1 attached file of a collection, not read",
        ),
        ("/Names<</EmbeddedFiles<</Names[(a)10 0 R]>>>>", None),
        ("/Collection<<>>", None),
    ],
)
def test_a_page_that_stands_for_something_else_says_so(
    both: Drawing, catalog: str, warning: str | None
) -> None:
    """All forms in XFA of a program have the same page, which asks for another viewer."""
    objects = [FILE_SPEC.encode(), stream(b"a", "/Type/EmbeddedFile"), stream(b"<xdp/>")]
    (page,) = both.rows(pdf([line("Please wait")], catalog=catalog, objects=objects))
    assert isinstance(page, Item) and page.warning == warning and page.parts[1] == "Please wait"


def words_of(path: Path) -> Words:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    return Words(data, (ctypes.c_ubyte * len(data)).from_buffer(data))


def east_asian(name: str, ordering: str, encoding: str, text: str) -> bytes:
    """A page with a text in one of Adobe's fonts that no file has."""
    font = (
        f"<</Type/Font/Subtype/Type0/BaseFont/{name}/Encoding/{encoding}/DescendantFonts[<</Type/Font"
        f"/Subtype/CIDFontType0/BaseFont/{name}/DW 1000/CIDSystemInfo<</Registry(Adobe)"
        f"/Ordering({ordering})/Supplement 2>>/FontDescriptor<</Type/FontDescriptor/FontName/{name}/Flags 4"
        "/FontBBox[0 -200 1000 900]/ItalicAngle 0/Ascent 800/Descent -200/CapHeight 700/StemV 80>>>>]>>"
    )
    shown = text.encode("utf-16-be").hex()
    return pdf([f"BT /F 24 Tf 20 50 Td <{shown}> Tj ET"], objects=[font.encode()], font="10 0 R")


CYRILLIC = "afii10017 afii10018 afii10019"
UNEMBEDDED = {
    "Cyrillic": (unembedded(CYRILLIC), "АБВ"),
    "Cyrillic in Type 1": (unembedded(CYRILLIC, "Type1", "Helvetica"), "АБВ"),
    "Cyrillic with serifs": (unembedded(CYRILLIC, name="TimesNewRomanPSMT"), "АБВ"),
    "Cyrillic in a font that nobody knows": (unembedded(CYRILLIC, name="Lobster"), "АБВ"),
    "Polish": (unembedded("zdotaccent lslash aogonek"), "żłą"),
    "Turkish": (unembedded("Gbreve Idotaccent scedilla"), "Ğİş"),
    "Greek": (unembedded("Alpha beta gamma"), "Αβγ"),
    "Hebrew": (unembedded("afii57664 afii57665"), "בא"),
    "Arabic": (unembedded("afii57409 afii57416"), "بء"),
    "simplified Chinese": (east_asian("STSong-Light", "GB1", "UniGB-UCS2-H", "文汉"), "文汉"),
    "traditional Chinese": (east_asian("MSung-Light", "CNS1", "UniCNS-UCS2-H", "文漢"), "文漢"),
    "Japanese": (east_asian("HeiseiKakuGo-W5", "Japan1", "UniJIS-UCS2-H", "文あ"), "文あ"),
    "Korean": (east_asian("HYSMyeongJo-Medium", "Korea1", "UniKS-UCS2-H", "한국"), "한국"),
}


@pytest.mark.parametrize("kind", UNEMBEDDED)
def test_letters_whose_font_is_not_in_the_file_are_drawn(both: Drawing, kind: str) -> None:
    data, said = UNEMBEDDED[kind]
    (page,) = both.rows(data)
    assert isinstance(page, Item)
    assert page.parts[1] == said and page.warning is None
    # Each letter in its own place, and not the same one: no boxes for letters that lack.
    wide = 50 if len(said) == 2 and ord(said[0]) > 0x3000 else 30
    picture = pixels(page).min(axis=2)
    letters = [picture[:, 42 + wide * at : 42 + wide * (at + 1)] for at in range(len(said))]
    assert all((letter < 128).sum() > 20 for letter in letters)
    assert not np.array_equal(letters[0], letters[1])


def test_a_page_that_lacks_letters_says_so(both: Drawing) -> None:
    lacks, has = both.rows(unembedded("A uniA500 uniA501"), unembedded("A B C"))
    assert isinstance(lacks, Item) and isinstance(has, Item)
    assert lacks.warning == "2 letters without a font: \ua500\ua501"
    assert has.warning is None


def test_codes_that_are_no_unicode_are_letters_without_a_font(both: Drawing) -> None:
    """PDFium takes a code of four bytes for the letter itself where the file says no other."""
    ranges = "4 begincodespacerange\n<00><7f>\n<c080><dfbf>\n<e08080><efbfbf>\n<f0808080><f7bfbfbf>\n"
    codes = (
        f"begincmap\n{ranges}endcodespacerange\n1 begincidrange\n<f0a8a780><f0a8a790>1\nendcidrange\nendcmap"
    )
    system = "/CIDSystemInfo<</Registry(Adobe)/Ordering(Japan1)/Supplement 0>>"
    font = (
        "<</Type/Font/Subtype/Type0/BaseFont/X/Encoding 11 0 R/DescendantFonts[<</Type/Font"
        f"/Subtype/CIDFontType2/BaseFont/X{system}/FontDescriptor<</Type/FontDescriptor/FontName/X/Flags 4"
        "/FontBBox[0 0 999 999]/ItalicAngle 0/Ascent 800/Descent -200/CapHeight 700/StemV 80>>>>]>>"
    )
    (page,) = both.rows(
        pdf(
            ["BT /F 24 Tf 20 100 Td <f0a8a780f0a8a781> Tj ET"],
            objects=[font.encode(), stream(codes.encode(), f"/Type/CMap/CMapName/X{system}")],
            font="10 0 R",
        )
    )
    assert isinstance(page, Item) and page.warning == "2 letters without a font"


def test_text_whose_codes_pdfium_does_not_know_is_missed(both: Drawing) -> None:
    (page,) = both.rows(east_asian("Ryumin-Light", "Japan1", "V", "文字"))
    assert isinstance(page, Item) and page.warning == "1 letter without a font"


def test_other_text_is_still_read_where_some_letters_lack(both: Drawing) -> None:
    unseen = "BT /F 12 Tf 3 Tr 20 100 Td (\\001) Tj 0 Tr ET "
    (page,) = both.rows(unembedded("A uniA500", beside=unseen))
    assert isinstance(page, Item) and page.warning == "1 letter without a font: \ua500"
    assert page.parts[1] == "A\nA\ua500"


def test_letters_that_are_not_to_be_seen_are_not_missed(both: Drawing) -> None:
    unseen = unembedded("uniA500").replace(b"BT ", b"BT 3 Tr ").replace(b"Length 34", b"Length 39")
    (page,) = both.rows(unseen)
    assert isinstance(page, Item) and page.warning is None


def test_pages_of_ordinary_fonts_are_what_pdfium_draws(both: Drawing) -> None:
    data = unembedded("A eacute germandbls bullet")
    cyrillic, ordinary, again = both.rows(unembedded(CYRILLIC), data, data)
    assert np.array_equal(pixels(ordinary), plainly(data, 1))
    assert np.array_equal(pixels(again), pixels(ordinary))
    assert isinstance(cyrillic, Item)


@pytest.mark.parametrize("state", ["ON", "OFF"])
@pytest.mark.parametrize("way", ["marked", "form", "nested", "unseen"])
def test_hidden_layers_are_neither_drawn_nor_read(both: Drawing, state: str, way: str) -> None:
    layer = b"<</Type/OCG/Name(layer)>>"
    form = "/Type/XObject/Subtype/Form/BBox[0 0 200 150]/Resources<</Font<</F 3 0 R>>"
    text = line("secret", y=50)
    objects = {
        "marked": [layer],
        "unseen": [layer],
        "form": [layer, stream(text.encode(), f"{form}>>/OC 10 0 R")],
        "nested": [layer, stream(LAYER.encode(), f"{form}/Properties<</L 10 0 R>>>>")],
    }[way]
    content = {"marked": LAYER, "unseen": LAYER.replace("BT", "BT 3 Tr"), "form": "/X Do", "nested": "/X Do"}
    data = pdf(
        [line("plain") + content[way]],
        catalog=f"/OCProperties<</OCGs[10 0 R]/D<</{state}[10 0 R]>>>>",
        resources="/Properties<</L 10 0 R>>" + ("/XObject<</X 11 0 R>>" if len(objects) > 1 else ""),
        objects=objects,
    )
    (page,) = both.rows(data)
    assert isinstance(page, Item)
    assert page.parts[1] == ("plain\nsecret" if state == "ON" else "plain")
    assert (pixels(page)[180:] < 128).any() == (state == "ON" and way != "unseen")


@pytest.mark.parametrize("unit", ["/UserUnit 10", "/UserUnit 10.0", "/UserUnit 11 0 R"])
def test_the_unit_of_a_page_is_its_own(both: Drawing, unit: str) -> None:
    data = pdf([line("a")], box="0 0 42 28", page=unit, objects=[b"null", b"10"])
    (page,) = both.rows(data)
    assert isinstance(page, Item) and pixels(page).shape == (584, 876, 3)


def test_a_file_is_looked_through_once_for_all_processes() -> None:
    """What one answer says of it, the next task tells to who has never seen the file."""
    data = pdf([line("a")], box="0 0 42 28", page="/UserUnit 10")
    drawing = PageDrawing(mode=PdfMode.BOTH, dpi=72, max_pages=9, max_pixels=4_000_000)
    limits = Limits(seconds=60.0, memory_bytes=1 << 30)
    with contextlib.closing(Renderers(drawing, limits, PictureFormat.PNG, count=1)) as renderers:
        descriptor = in_memory(data, sealed=True)
        try:

            def drawn(file: int, known: Known) -> Drawn:
                task = Task(file=file, size=len(data), page=1, known=known)
                answer = renderers.draw(task, descriptor, source="a.pdf")
                assert isinstance(answer, Drawn)
                return answer

            first = drawn(1, {})
            assert first.known == {Trait.UNITS: True, Trait.LETTERS: False, Trait.LAYERS: False}
            # A wrong one shows that nobody looks again.
            told = drawn(2, {Trait.UNITS: False, Trait.LAYERS: False})
            sizes = [Image.open(io.BytesIO(each.picture)).size for each in (first, told)]
            assert sizes == [(420, 280), (42, 28)]
        finally:
            os.close(descriptor)


def test_what_a_page_says_of_its_file_is_told_with_the_next(make: Make) -> None:
    settings = make(mode=PdfMode.BOTH)
    told: list[Known] = []
    draw = settings.documents._renderers.draw

    def noted(task: Task, descriptor: int, *, source: str) -> Drawn | Refusal:
        told.append(task.known)
        return draw(task, descriptor, source=source)

    settings.documents._renderers.draw = noted  # type: ignore[method-assign]
    assert len(settings.rows(pdf([line("a"), line("b")]))) == 2
    assert told == [{}, {Trait.UNITS: False, Trait.LETTERS: False, Trait.LAYERS: False}]


def test_the_unit_of_a_page_counts_for_its_limit(both: Drawing) -> None:
    (page,) = both.rows(pdf([line("a")], page="/UserUnit 1000"))
    assert isinstance(page, Failure) and page.reason.startswith("200000 x 150000 points at 150 dpi")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["environ-", "ment"], "environment"),
        (["self-", "employed"], "self-employed"),
        (["Jean-", "Paul"], "Jean-Paul"),
        (["a well-known re-", "use, well-", "known"], "a well-known reuse, well-known"),
    ],
)
def test_words_that_the_end_of_a_line_parts_are_joined(both: Drawing, lines: list[str], said: str) -> None:
    (page,) = both.rows(pdf(["".join(line(text, y=100 - 14 * at) for at, text in enumerate(lines))]))
    assert isinstance(page, Item) and page.parts[1] == said


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (r"one\003two", "one two"),
        (r"\003one\003\003two\003", "one  two"),
        (r"a\003b\003c\003d\003e\003f", "a b c d e f"),
        (r"a\003\003\003\003\003\003\003b", "a       b"),
    ],
)
def test_codes_without_a_meaning_are_blanks(both: Drawing, codes: str, said: str) -> None:
    (page,) = both.rows(pdf([line(codes)]))
    assert isinstance(page, Item) and page.parts[1] == said


def test_text_beyond_the_edges_is_not_read_and_lines_are_kept(both: Drawing) -> None:
    shown = "".join(line(f"line {number}", x=20, y=120 - 25 * number) for number in range(5))
    beyond = pdf([shown + line("beyond", y=300)], page="/CropBox[0 0 200 150]")
    inside, cropped = both.rows(pdf([shown]), beyond)
    assert isinstance(inside, Item) and isinstance(cropped, Item)
    assert inside.parts[1] == cropped.parts[1] == "line 0\nline 1\nline 2\nline 3\nline 4"


SEEDS = [
    *(data for data, _ in UNEMBEDDED.values()),
    form("/F 4/FT/Tx/T(a)/V(4711 EUR)"),
    *FILES.values(),
    pdf([line("secret")], password=b"word"),
    endless(),
]


def mutated(random: np.random.Generator, data: bytes) -> bytes:
    """The file with bytes, numbers and pieces that somebody changed."""
    found = bytearray(data)
    for _ in range(random.integers(1, 12)):
        place, size = int(random.integers(len(found))), int(random.integers(1, 40))
        match int(random.integers(5)):
            case 0:
                found[place] = int(random.integers(256))
            case 1:
                del found[place : place + size]
            case 2:
                found[place:place] = found[place // 2 : place // 2 + size]
            case 3:
                found = found[: max(place, 9)]
            case _:
                numbers = [match.span() for match in re.finditer(rb"[0-9]+", bytes(found))]
                if numbers:
                    begin, end = numbers[int(random.integers(len(numbers)))]
                    new = random.choice([0, 1, 2, 3, 10, 255, 65536, 2**31 - 1, 2**32, 10**15])
                    found[begin:end] = b"%d" % new
    return bytes(found)


@pytest.mark.fuzzes
@pytest.mark.parametrize("seed", range(4))
def test_files_that_nobody_wrote(make: Make, seed: int) -> None:
    """Each file becomes pages or failures, and the files between are drawn."""
    drawing = make(mode=PdfMode.BOTH, seconds=3.0, dpi=72)
    random = np.random.default_rng(seed)
    good = figures(1)
    files: list[bytes] = []
    for _ in range(100):
        files += [mutated(random, SEEDS[int(random.integers(len(SEEDS)))]), good]
    rows = drawing.rows(*files)
    by_file: dict[int, list[Item | Failure]] = {number: [] for number in range(len(files))}
    for row in rows:
        by_file[int(row.id.partition(".")[0])].append(row)
    assert [row.id for row in rows] == [row.id for found in by_file.values() for row in found]
    expected = plainly(good, 1, dpi=72)
    for number, found in by_file.items():
        assert found
        if number % 2:
            np.testing.assert_array_equal(pixels(found[0]), expected)
