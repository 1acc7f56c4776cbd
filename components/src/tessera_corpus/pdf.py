"""PDF files: their pages as pixels and text, drawn by PDFium in confined processes.

A file comes as memory, fonts are those that it holds, PDFium's own and those of ``fonts``, and no script or
action of a file runs: this PDFium has no JavaScript. What forms are filled in with is drawn and read, also
where the file leaves the appearance of its fields to who shows it. Hidden layers are neither.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import msgspec
from PIL import Image

from tessera.extras import absent, lack, missing
from tessera.sandbox import Limits, Pool, ProcessLost
from tessera.sandbox.memory import Memory
from tessera_corpus import fonts, forms, ink, layers, page_text
from tessera_corpus.words import Words

POINTS: Final = 72
"""An inch has so many of the units in which a page is measured."""

# At 150 dpi a page of text took 77 ms and 485 kB, at Pillow's own level 6 it takes 83 ms and 581 kB; a
# scanned one 124 ms and 1.5 MB, and 393 ms and 1.3 MB. To draw them takes 26 and 33 ms.
_PNG_LEVEL: Final = 1
# UTF-8 takes three bytes for each of UTF-16's units at most, which is what PDFium counts.
_TEXT_BYTES: Final = 3 * page_text.MOST_CHARACTERS
# Letters of a warning.
_NAMED: Final = 20


class PdfMode(StrEnum):
    """What a page becomes: its picture, its text, or the picture followed by the text."""

    IMAGE = "image"
    TEXT = "text"
    BOTH = "both"


class PictureFormat(StrEnum):
    """The file that a drawn page is handed on in. Both are exact."""

    BMP = "bmp"
    PNG = "png"


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How pages are drawn: pixels for each inch, and what a file and a page may have."""

    mode: PdfMode
    dpi: int
    max_pages: int
    max_pixels: int


class Trait(StrEnum):
    """What few files have: layers, letters that PDFium's own fonts lack, pages with a unit of their own."""

    LAYERS = "layers"
    LETTERS = "letters"
    UNITS = "units"


Known = dict[Trait, bool]
"""Whether a file may have each. To look through one of 6.6 MB takes 0.6 ms, and where objects are packed
7 us for each of its pages: no process looks again that is told."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Page ``page``, from 1, of the ``size`` bytes in the descriptor that comes along; None: how many it has.

    Equal numbers in ``file`` are one file. ``known`` is what earlier answers said of it.
    """

    file: int
    size: int
    page: int | None
    known: Known = msgspec.field(default_factory=dict)


class Page(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A page of a file of ``pages``, in the shared memory: first its pixels as 8-bit BGR, ``height`` rows
    from the top, each of ``stride(width)`` bytes; then ``text_bytes`` of UTF-8. No picture is 0 x 0.
    ``warning`` says what of the page is not there."""

    pages: int
    width: int = 0
    height: int = 0
    text_bytes: int = 0
    warning: str | None = None
    known: Known = msgspec.field(default_factory=dict)


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why a page, or with ``pages`` None the whole file, cannot be had."""

    reason: str
    pages: int | None = None


Answer = Page | Refusal

_encode = msgspec.msgpack.Encoder().encode
_decode_task = msgspec.msgpack.Decoder(Task).decode
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A page, copied: its picture's file and its text, each empty where the mode has none; how many pages
    the file has, and what of the page is not there."""

    pages: int
    picture: bytes = b""
    text: str = ""
    warning: str | None = None
    known: Known = msgspec.field(default_factory=dict)


def stride(width: int) -> int:
    """Bytes from a row to the next, as a BMP has them."""
    return (3 * width + 3) // 4 * 4


class Renderers:
    """``count`` confined processes that draw pages; called from as many threads."""

    def __init__(
        self, drawing: Drawing, limits: Limits, picture_format: PictureFormat, *, count: int
    ) -> None:
        if absent("pypdfium2"):
            raise missing("a PDF file", "pypdfium2", extra="corpus")
        self._drawing = drawing
        self._write: Callable[[Memory, int, int], bytes] = (
            _bmp if picture_format is PictureFormat.BMP else _png
        )
        self._pool = Pool(
            "PDF renderer",
            f"{__name__}:Handler",
            msgspec.json.encode(drawing).decode(),
            _answers,
            limits,
            # A row of one pixel is padded to four bytes.
            shared_bytes=4 * drawing.max_pixels + _TEXT_BYTES,
            count=count,
        )

    def draw(self, task: Task, descriptor: int, *, source: str) -> Drawn | Refusal:
        """Raises ``ProcessLost`` where the page cost its process, ``Unavailable`` where there is none."""
        return self._pool.call(_encode(task), descriptor, self._taken, over=source)

    def close(self) -> None:
        self._pool.close()

    def _taken(self, answer: Answer, memory: Memory) -> Drawn | Refusal:
        if answer.pages is not None and not 1 <= answer.pages <= self._drawing.max_pages:
            raise ProcessLost("crash")
        if isinstance(answer, Refusal):
            return answer
        width, height = answer.width, answer.height
        if (width, height) != (0, 0) and not (
            width > 0 and height > 0 and width * height <= self._drawing.max_pixels
        ):
            raise ProcessLost("crash")
        if not 0 <= answer.text_bytes <= _TEXT_BYTES:
            raise ProcessLost("crash")
        begin = stride(width) * height
        try:
            text = memory[begin : begin + answer.text_bytes].tobytes().decode()
        except UnicodeDecodeError:
            raise ProcessLost("crash") from None
        picture = self._write(memory[:begin], width, height) if begin else b""
        return Drawn(
            pages=answer.pages, picture=picture, text=text, warning=answer.warning, known=answer.known
        )


def _bmp(pixels: Memory, width: int, height: int) -> bytes:
    # A negative height: rows from the top.
    header = b"BM" + b"".join(
        number.to_bytes(size, "little", signed=True)
        for number, size in (
            (54 + pixels.nbytes, 4),
            (0, 4),
            (54, 4),
            (40, 4),
            (width, 4),
            (-height, 4),
            (1, 2),
            (24, 2),
            (0, 4),
            (pixels.nbytes, 4),
            (0, 16),
        )
    )
    return b"".join((header, pixels.data))


def _png(pixels: Memory, width: int, height: int) -> bytes:
    # A copy first, which the renderer cannot write to any more.
    image = Image.frombytes("RGB", (width, height), pixels.tobytes(), "raw", "BGR", stride(width))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=_PNG_LEVEL)
    return file.getvalue()


class Handler:
    """A renderer, in its confined process. Implements ``sandbox.memory.Handler``."""

    def __init__(self, drawing: str) -> None:
        import pypdfium2

        self._drawing = msgspec.json.decode(drawing, type=Drawing)
        self._file: _File | None = None
        _without_system_fonts(pypdfium2.raw)
        self._fonts = fonts.Fonts(pypdfium2.raw)
        self._how = f"to draw more {lack('fonts', extra='fonts')}"
        # What the wrapper imports late and what PDFium reads once is there before the first file.
        with pypdfium2.PdfDocument(_SMALL) as document:
            page = document[0]
            page.get_textpage().get_text_bounded()
            page.render()

    def answer(self, memory: Memory, task: bytes, descriptor: int) -> bytes:
        return _encode(self._page(memory, _decode_task(task), descriptor))

    def _page(self, memory: Memory, task: Task, descriptor: int) -> Answer:
        import pypdfium2

        pages: int | None = None
        try:
            if self._file is None or self._file.number != task.file:
                self._forget()
                self._fonts.charsets.clear()
                self._file = _File(task, descriptor)
            self._file.known |= task.known
            pages = len(self._file.document)
            if pages > self._drawing.max_pages:
                return Refusal(reason=f"{pages} pages, the limit is {self._drawing.max_pages}")
            if task.page is None:
                return Page(pages=pages)
            return self._drawn(memory, self._file, task.page - 1, pages)
        except MemoryError:
            # What was taken is given back with the file.
            self._forget()
            return Refusal(reason="takes more memory than a renderer has", pages=pages)
        except pypdfium2.PdfiumError as error:
            return Refusal(reason=_reason(error), pages=pages)

    def _drawn(self, memory: Memory, file: _File, index: int, pages: int) -> Answer:
        drawing = self._drawing
        document = file.document
        scale = drawing.dpi / POINTS
        width = height = text_bytes = 0
        warnings = [file.stands_for]
        if drawing.mode is not PdfMode.TEXT:
            # Known before the page's content is read.
            scale *= file.user_unit(index)
            size = document.get_page_size(index)
            if not all(0 < side * scale < drawing.max_pixels for side in size) or (
                math.ceil(size[0] * scale) * math.ceil(size[1] * scale) > drawing.max_pixels
            ):
                inches = " x ".join(f"{side * scale / drawing.dpi * POINTS:g}" for side in size)
                reason = f"{inches} points at {drawing.dpi} dpi, the limit is "
                return Refusal(reason=f"{reason}{drawing.max_pixels} pixels", pages=pages)
        page = document[index]
        pages_read = [page]
        try:
            may_lack = False
            if drawing.mode is not PdfMode.TEXT:
                width, height = _render(page, scale, memory)
                may_lack = bool(self._fonts.charsets) and (
                    self._fonts.asked_for_script or file.may_have(Trait.LETTERS)
                )
            if document.formenv and (drawing.mode is not PdfMode.IMAGE or may_lack):
                pages_read = forms.read(document, index, page, raw())
                page = pages_read[0]
            if drawing.mode is not PdfMode.TEXT:
                lacks = self._drawn_with_more_fonts(memory, file, index, page, scale) if may_lack else None
                warnings.append(lacks or self._lost(memory, file, page, width, height))
            if drawing.mode is not PdfMode.IMAGE:
                text = page_text.read(page, raw())
                if text and file.may_have(Trait.LAYERS) and layers.hide(page, raw()):
                    text = page_text.read(page, raw())
                for fields in pages_read[1:]:
                    more = page_text.read(fields, raw()) or ""
                    text = None if text is None else f"{text}\n{more}".strip()
                if text is None or len(text) > page_text.MOST_CHARACTERS:
                    return Refusal(reason=f"more than {page_text.MOST_CHARACTERS} characters", pages=pages)
                begin = stride(width) * height
                encoded = text.encode()
                text_bytes = len(encoded)
                memory[begin : begin + text_bytes].data[:] = encoded
        finally:
            for each in pages_read:
                each.close()
        return Page(
            pages=pages,
            width=width,
            height=height,
            text_bytes=text_bytes,
            warning="; ".join(filter(None, warnings)) or None,
            known=file.known,
        )

    def _drawn_with_more_fonts(
        self, memory: Memory, file: _File, index: int, page: Any, scale: float
    ) -> str | None:
        """Draw a page again where PDFium's own fonts lack letters of it; say which ones still are."""
        missing_letters = fonts.lacking(page, raw(), most=page_text.MOST_CHARACTERS)
        if self._fonts.have_any(missing_letters):
            with self._fonts.lent(missing_letters):
                document = file.opened()
                try:
                    again = document[index]
                    _render(again, scale, memory)
                    again.close()
                finally:
                    document.close()
                missing_letters = self._fonts.still_lacking(missing_letters)
        if not missing_letters:
            return None
        warning = _warning(missing_letters)
        return warning if self._fonts.installed else f"{warning}; {self._how}"

    def _lost(self, memory: Memory, file: _File, page: Any, width: int, height: int) -> str | None:
        """What a page has that came out blank."""
        if not ink.is_blank(memory, width, height, stride(width)):
            return None
        if file.may_have(Trait.LAYERS):
            layers.hide(page, raw())
        return ink.lost(page, raw())

    def _forget(self) -> None:
        if self._file is not None:
            self._file.document.close()
            self._file = None


class _File:
    """The file that is open: pages of one file come one after another, and to read where they are takes
    long where they are many."""

    def __init__(self, task: Task, descriptor: int) -> None:
        self.number = task.file
        self.known: Known = {}
        # Copy on write: PDFium takes memory that can be written to.
        data = mmap.mmap(descriptor, task.size, flags=mmap.MAP_PRIVATE)
        self._buffer = (ctypes.c_ubyte * task.size).from_buffer(data)
        self._words = Words(data, self._buffer)
        self.document = self.opened()

    def opened(self) -> Any:
        """The file, opened once more."""
        import pypdfium2

        document = pypdfium2.PdfDocument(self._buffer)
        # Before the first page.
        document.init_forms()
        return document

    @cached_property
    def stands_for(self) -> str | None:
        """What is to be seen elsewhere in the file, where its pages say but that it is there."""
        pdfium = raw()
        # ISO 32000-2, 7.7.2: NeedsRendering.
        if pdfium.FPDF_GetFormType(self.document) == pdfium.FORMTYPE_XFA_FULL:
            return "stands for a form in XFA, which is not shown"
        attached = pdfium.FPDFDoc_GetAttachmentCount(self.document)
        # ISO 32000-1, 12.3.5. Other files may have attachments beside their pages.
        if attached > 0 and self._words.catalog_may_have(b"/Collection"):
            return f"stands for {attached} attached file{'s' * (attached > 1)} of a collection, not read"
        return None

    def may_have(self, trait: Trait) -> bool:
        if trait not in self.known:
            self.known[trait] = _LOOKS[trait](self._words)
        return self.known[trait]

    def user_unit(self, index: int) -> float:
        """How many points a page's unit is, ISO 32000-1, 14.11.2."""
        if not self.may_have(Trait.UNITS):
            return 1.0
        import pypdfium2

        # A copy has the page's dictionary in plain text.
        with pypdfium2.PdfDocument.new() as copy:
            copy.import_pages(self.document, [index])
            file = io.BytesIO()
            copy.save(file)
        data = file.getvalue()
        unit = re.search(rb"/UserUnit\s+([0-9.]+)(?:\s+0\s+R)?", data)
        if unit is not None and unit[0].endswith(b"R"):
            unit = re.search(rb"\n%b 0 obj\s+([0-9.]+)" % unit[1], data)
        try:
            value = float(unit[1]) if unit is not None else 1.0
        except ValueError:
            return 1.0
        return value if value > 0 else 1.0


_LOOKS: Final[dict[Trait, Callable[[Words], bool]]] = {
    Trait.LAYERS: lambda words: words.catalog_may_have(b"/OCProperties"),
    Trait.LETTERS: lambda words: words.may_have(fonts.WORDS),
    Trait.UNITS: lambda words: words.may_have(frozenset({b"/UserUnit"})),
}


def raw() -> Any:
    """PDFium's functions."""
    import pypdfium2

    return pypdfium2.raw


def _render(page: Any, scale: float, memory: Memory) -> tuple[int, int]:
    """Draw a page to the beginning of the memory; its width and height in pixels."""
    import pypdfium2

    bitmap = page.render(
        scale=scale,
        # PDFium draws where the pool reads.
        bitmap_maker=lambda width, height, **kind: pypdfium2.PdfBitmap.new_native(
            width,
            height,
            buffer=_buffer(memory, stride(width) * height),
            stride=stride(width),
            **kind,
        ),
        force_bitmap_format=pypdfium2.raw.FPDFBitmap_BGR,
    )
    size = bitmap.width, bitmap.height
    bitmap.close()
    return size


def _warning(missing_letters: Counter[str]) -> str:
    """Say which letters a page's picture lacks."""
    count = sum(missing_letters.values())
    named = "".join(sorted(letter for letter in missing_letters if letter != "\ufffd")[:_NAMED])
    what = f"{count} letter{'s' * (count > 1)} without a font"
    what += f": {named}" if named else ""
    return what


def _buffer(memory: Memory, nbytes: int) -> Any:
    if nbytes > memory.nbytes:
        raise MemoryError
    return (ctypes.c_ubyte * nbytes).from_buffer(memory.data)


def _reason(error: Any) -> str:
    import pypdfium2

    return {
        pypdfium2.raw.FPDF_ERR_PASSWORD: "encrypted, and a password is needed",
        pypdfium2.raw.FPDF_ERR_SECURITY: "encrypted in a way that is not supported",
        pypdfium2.raw.FPDF_ERR_FORMAT: "no PDF file, a damaged one, or one without pages",
        pypdfium2.raw.FPDF_ERR_SUCCESS: "without pages",
    }.get(error.err_code, "damaged")


def _without_system_fonts(raw: Any) -> None:
    """Start PDFium again with a list of font directories that is empty, rather than that of the system.

    So a page looks the same on every machine, and nothing is read after the process is confined.
    """
    raw.FPDF_DestroyLibrary()
    none = (ctypes.POINTER(ctypes.c_char) * 1)()
    raw.FPDF_InitLibraryWithConfig(raw.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=none))


_SMALL: Final = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 72 72]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>"
    b"endobj\n4 0 obj<</Length 30>>stream\nBT /F 9 Tf 9 9 Td (a) Tj ET  \nendstream endobj\n"
    b"5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
)
