"""PDF pages of a folder as they are embedded, beside poppler.

A page is right where its picture has poppler's ink within a quarter and its text nine tenths of poppler's
words.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from tessera import imaging
from tessera.local.content import ImageFile
from tessera_corpus.documents import Documents, DocumentSettings
from tessera_corpus.item import Document, Failure, Item, file_of
from tessera_corpus.pdf import PdfMode
from tessera_tools.table import table

INK_APART: Final = 0.25
"""Of the larger of two pages' ink."""
WORDS_FOUND: Final = 0.9
"""Of poppler's words."""

_DPI: Final = 72
_SECONDS: Final = 30.0
# Ink of less than so many black pixels is noise of the edges of lines.
_FAINT: Final = 40.0
_WORD: Final = re.compile(r"\w+")
VERDICTS: Final = {
    "right": "right",
    "warned": "not as poppler, and the row says which letters lack",
    "refused": "refused, and so by poppler",
    "refused alone": "refused, and shown by poppler",
    "ink": "other ink",
    "words": "other words",
    "read alone": "read, and not by poppler",
}
BAD: Final = ("ink", "words", "refused alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A page: its ink in black pixels, and its words."""

    ink: float
    words: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of a page; ``said`` is the row's warning or error."""

    path: str
    page: int | None
    verdict: str
    said: str = ""
    ink: tuple[float, float] | None = None
    words: float | None = None


def paths(folder: Path) -> list[Path]:
    """The PDF files of a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".pdf" and path.is_file())


def check(folder: Path, out: Path | None = None, *, most_pages: int = 2) -> bool:
    """Print what became of the first pages of each PDF file; whether any is bad."""
    if shutil.which("pdftoppm") is None:
        raise SystemExit("poppler is not installed: scripts/system-packages")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch, open(out or "/dev/null", "w") as lines:
        for found in _all(paths(folder), Path(scratch), most_pages):
            counts[found.verdict] += 1
            lines.write(json.dumps(asdict(found)) + "\n")
            lines.flush()
            if found.verdict in BAD:
                print(
                    f"{found.verdict}: {found.path} page {found.page}: {found.said} {found.ink} {found.words}"
                )
    rows = [[said, str(counts[verdict])] for verdict, said in VERDICTS.items()]
    print(table(("pages", "count"), rows))
    return any(counts[verdict] for verdict in BAD)


def _all(files: Sequence[Path], scratch: Path, most_pages: int) -> Iterator[Found]:
    settings = DocumentSettings(mode=PdfMode.BOTH, dpi=_DPI, processes=2, seconds=_SECONDS)
    others: dict[str, Future[dict[int, Shown]]] = {}

    with ThreadPoolExecutor(2) as pool, Documents(settings) as documents:

        def rows() -> Iterator[Document]:
            for path in files:
                others[str(path)] = pool.submit(_by_poppler, path, scratch, most_pages)
                yield Document(id=str(path), source=str(path), data=path.read_bytes())

        def done(page: str, _: bytes) -> bool:
            return int(page.rpartition("=")[2]) > most_pages

        for path, some in groupby(documents.pages(rows(), done), lambda row: file_of(row.id, row.page)):
            theirs = others.pop(path).result()
            for row in some:
                yield _found(path, row, theirs)


def _found(path: str, row: Item | Failure, theirs: dict[int, Shown]) -> Found:
    other = theirs.get(row.page or 1)
    if isinstance(row, Failure):
        verdict = "refused" if other is None else "refused alone"
        return Found(path=path, page=row.page, verdict=verdict, said=row.reason)
    said = row.warning or ""
    if other is None:
        return Found(path=path, page=row.page, verdict="read alone", said=said)
    ours = _shown(row)
    ink = (round(ours.ink, 1), round(other.ink, 1))
    words = (ours.words & other.words).total() / max(1, other.words.total())
    if not other.words:
        words = 1.0
    verdict = "right"
    if abs(ours.ink - other.ink) > INK_APART * max(ours.ink, other.ink) and max(ink) > _FAINT:
        verdict = "ink"
    elif words < WORDS_FOUND:
        verdict = "words"
    if verdict != "right" and said:
        verdict = "warned"
    return Found(path=path, page=row.page, verdict=verdict, said=said, ink=ink, words=round(words, 3))


def _shown(row: Item) -> Shown:
    picture, *texts = row.parts
    assert isinstance(picture, ImageFile)
    image = imaging.decode(picture.data, param="page")
    return Shown(ink=_ink(image), words=_words("".join(text for text in texts if isinstance(text, str))))


def _ink(image: Image.Image) -> float:
    return float((255 - np.asarray(image.convert("L"), np.float32)).sum()) / 255


def _words(text: str) -> Counter[str]:
    # Arabic letters in their forms, ligatures and marks of direction are the same words without.
    plain = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    return Counter(_WORD.findall(unicodedata.normalize("NFKC", plain).casefold()))


def _by_poppler(path: Path, scratch: Path, most_pages: int) -> dict[int, Shown]:
    """What poppler shows of the first pages, by their numbers; none of a file that it cannot read."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        first = ("-f", "1", "-l", str(most_pages), "-cropbox")
        texts = _run("pdftotext", *first, str(path), "-")
        _run("pdftoppm", *first, "-r", str(_DPI), str(path), str(folder / "page"))
        pages = (texts or b"").decode("utf-8", "replace").split("\f")
        shown = {}
        for picture in folder.glob("page-*.ppm"):
            number = int(picture.stem.rpartition("-")[2])
            text = pages[number - 1] if number <= len(pages) else ""
            with Image.open(picture) as image:
                shown[number] = Shown(ink=_ink(image), words=_words(text))
        return shown


def _run(*command: str) -> bytes | None:
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return ran.stdout
