"""The pages of documents, as items, drawn ahead."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Final, Self

import msgspec
from blake3 import blake3

from tessera import machine
from tessera.local.content import ImageFile, Part
from tessera.sandbox import Limits, ProcessLost, in_memory
from tessera.settings import MIB, POSITIVE, Setting
from tessera_corpus.item import Document, Failure, Item
from tessera_corpus.pdf import Drawing, Drawn, Known, PdfMode, PictureFormat, Refusal, Renderers, Task


class DocumentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of PDF files."""

    mode: Annotated[
        PdfMode, Setting(flag="--pdf", help="what a page is embedded as: its picture, its text, or both")
    ] = PdfMode.IMAGE
    dpi: Annotated[int, Setting(flag="--dpi", check=POSITIVE, help="pixels for each inch of a page")] = 150
    max_pages: Annotated[
        int,
        Setting(
            flag="--max-pages", check=POSITIVE, help="pages of one PDF file; a file with more is refused"
        ),
    ] = 10_000
    max_bytes: Annotated[
        int, Setting(flag="--max-pdf-mb", unit=MIB, check=POSITIVE, help="size of one PDF file")
    ] = 256 * MIB
    max_pixels: Annotated[
        int,
        Setting(
            flag="--max-page-pixels", check=POSITIVE, help="pixels of one page; A0 at 150 dpi has 35 million"
        ),
    ] = 50_000_000
    seconds: Annotated[
        float,
        Setting(
            flag="--page-seconds", check=POSITIVE, help="processor time that a renderer has for one page"
        ),
    ] = 30.0
    memory_bytes: Annotated[
        int,
        Setting(
            flag="--page-mb",
            unit=MIB,
            check=POSITIVE,
            help="memory that a renderer has for a page, beside its file",
        ),
    ] = 1024 * MIB
    processes: Annotated[
        int, Setting(flag="--pdf-processes", help="processes that draw pages; 0: one for each core")
    ] = 0


# A file whose pages end or hold one renderer after another is given up: 10,000 pages of 30 s each would hold
# a run for days.
_MAX_LOST: Final = 5
# Of a page's hash; another number, and every page is embedded again: 3 has fonts for letters without.
_VERSION: Final = 3
# Rows that are looked at ahead.
_MAX_ROWS: Final = 256


class Documents:
    """Draws the pages of documents in processes of its own, several at a time and ahead of who takes them.

    At 150 dpi one core draws 42 pages of text or 35 scanned ones a second (24 and 29 ms of its time each).
    To hand one on as BMP takes this process 1.4 to 1.8 ms, as PNG 60 and 138 ms: PNG is for a service alone.
    The text of such a page takes 4 ms. The processes are started for the first document: they take
    0.7 s of processor time, a third of a run with nothing left to embed.

    ``ahead_bytes`` bounds the pages that wait, and once more the files that they are of. Beyond it come the
    pages that are being drawn, two for each process, and what one file has.
    """

    def __init__(
        self,
        settings: DocumentSettings,
        picture_format: PictureFormat = PictureFormat.BMP,
        *,
        ahead_bytes: int = 256 * MIB,
    ) -> None:
        self._settings = settings
        self._picture_format = picture_format
        self._ahead_bytes = ahead_bytes
        self._processes = settings.processes or machine.cores()
        self._threads = ThreadPoolExecutor(self._processes, thread_name_prefix="pages")
        self._files = 0
        self._renderers: Renderers | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, when the pages that they draw are drawn."""
        self._threads.shutdown(cancel_futures=True)
        if self._renderers is not None:
            self._renderers.close()

    def pages(
        self, rows: Iterator[Item | Document | Failure], done: Callable[[str, bytes], bool]
    ) -> Iterator[Item | Failure]:
        """The rows in order, each document replaced by its pages.

        A page is an item ``FILE#page=N`` with N from 1; its hash is made of the file, N and how it is drawn.
        A page of which ``done(id, hash)`` is true is left out and not drawn. What cannot be drawn is one
        failure for the file, or for the page where only that one is bad. Raises ``Unavailable`` when no
        renderer can be started, ``ConfigError`` without ``pypdfium2``, and what ``rows`` raises.
        """
        ahead = _Ahead(self, rows, done)
        try:
            yield from ahead.rows()
        finally:
            ahead.close()

    def _open(self, document: Document) -> _File:
        if self._renderers is None:
            # They end with the thread that starts them.
            self._renderers = self._threads.submit(self._start).result()
        self._files += 1
        return _File(document, self._files, self._settings)

    def _start(self) -> Renderers:
        settings = self._settings
        drawing = Drawing(
            mode=settings.mode,
            dpi=settings.dpi,
            max_pages=settings.max_pages,
            max_pixels=settings.max_pixels,
        )
        # Files are mapped, which counts as memory of the process.
        limits = Limits(seconds=settings.seconds, memory_bytes=settings.memory_bytes + settings.max_bytes)
        return Renderers(drawing, limits, self._picture_format, count=self._processes)

    def _draw(self, file: _File, page: int | None) -> Drawn | Refusal:
        assert self._renderers is not None
        task = Task(file=file.number, size=file.nbytes, page=page, known=file.known)
        name = file.source if page is None else f"{file.source}, page {page}"
        return self._renderers.draw(task, file.descriptor, source=name)


class _Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A page that cost its renderer; how many pages the file has, where that is known."""

    reason: str
    pages: int | None = None


_Outcome = Drawn | Refusal | _Lost


class _File:
    """A document whose pages are being drawn: those asked for that nobody has taken, in order."""

    def __init__(self, document: Document, number: int, settings: DocumentSettings) -> None:
        self.id = document.id
        self.source = document.source
        self.number = number
        self.nbytes = len(document.data)
        self.asked: deque[tuple[int | None, Future[_Outcome]]] = deque()
        self.next_page = 1
        self.pages: int | None = None
        self.known: Known = {}
        self.lost = 0
        self._hash = blake3(document.data).digest() + msgspec.json.encode(
            (_VERSION, settings.dpi, settings.mode)
        )
        self.descriptor = in_memory(document.data, sealed=True)

    @property
    def over(self) -> bool:
        """Whether every page was asked for."""
        return self.pages is not None and self.next_page > self.pages

    def page_id(self, page: int) -> str:
        return f"{self.id}#page={page}"

    def page_hash(self, page: int) -> bytes:
        return blake3(self._hash + page.to_bytes(8, "little")).digest()

    def row(self, page: int, outcome: _Outcome) -> Item | Failure:
        page_id = self.page_id(page)
        if not isinstance(outcome, Drawn):
            return Failure(id=page_id, source=self.source, page=page, reason=outcome.reason)
        parts: list[Part] = [ImageFile(outcome.picture)] if outcome.picture else []
        if outcome.text:
            parts.append(outcome.text)
        if not parts:
            return Failure(id=page_id, source=self.source, page=page, reason="the page has no text")
        return Item(
            id=page_id,
            source=self.source,
            page=page,
            parts=tuple(parts),
            content_hash=self.page_hash(page),
            warning=outcome.warning,
        )

    def close(self) -> None:
        for _, future in self.asked:
            if not future.cancel():
                # Its thread has the descriptor.
                future.exception()
        os.close(self.descriptor)


class _Ahead:
    """One run over rows: those that were read and not yet taken, in order."""

    def __init__(
        self,
        documents: Documents,
        rows: Iterator[Item | Document | Failure],
        done: Callable[[str, bytes], bool],
    ) -> None:
        self._documents = documents
        self._rows = rows
        self._more = True
        self._done = done
        self._waiting: deque[Item | Failure | _File] = deque()
        self._lock = threading.Lock()
        self._drawing = 0
        # Of pages that were drawn and of items; of files.
        self._nbytes = 0
        self._file_bytes = 0

    def rows(self) -> Iterator[Item | Failure]:
        while True:
            self._fill()
            if not self._waiting:
                return
            first = self._waiting[0]
            if not isinstance(first, _File):
                self._waiting.popleft()
                self._count(first, -1)
                yield first
            elif first.asked:
                page, future = first.asked.popleft()
                outcome = future.result()
                with self._lock:
                    self._nbytes -= _nbytes(outcome)
                yield from self._taken(first, page, outcome)
            else:
                self._waiting.popleft()
                self._file_bytes -= first.nbytes
                first.close()

    def close(self) -> None:
        for row in self._waiting:
            if isinstance(row, _File):
                row.close()

    def _taken(self, file: _File, page: int | None, outcome: _Outcome) -> Iterator[Item | Failure]:
        self._learn(file, outcome)
        if file.pages == 0:
            yield Failure(id=file.id, source=file.source, reason=getattr(outcome, "reason", "no pages"))
        elif page is not None:
            yield file.row(page, outcome)
        if isinstance(outcome, _Lost) and file.pages:
            file.lost += 1
            if file.lost >= _MAX_LOST and not file.over:
                reason = f"from page {file.next_page} on left out: {_MAX_LOST} pages cost their renderer"
                file.pages = file.next_page - 1
                yield Failure(id=file.id, source=file.source, reason=reason)

    def _learn(self, file: _File, outcome: _Outcome) -> None:
        """How many pages there are to ask for, by the first answer: 0 where the file cannot be opened."""
        if file.pages is None:
            file.pages = outcome.pages or 0
        if isinstance(outcome, Drawn):
            file.known = file.known | outcome.known

    def _fill(self) -> None:
        """Ask for pages, and look at rows, as far ahead as is allowed."""
        for row in self._waiting:
            if isinstance(row, _File):
                self._ask(row)
        while (
            self._more
            and len(self._waiting) < _MAX_ROWS
            and self._file_bytes < self._documents._ahead_bytes
            and (self._room or not self._waiting)
        ):
            found = next(self._rows, None)
            if found is None:
                self._more = False
            elif not isinstance(found, Document):
                self._waiting.append(found)
                self._count(found, 1)
            elif reason := self._refusal(found):
                self._waiting.append(found.failed(reason))
            else:
                file = self._documents._open(found)
                self._file_bytes += file.nbytes
                self._waiting.append(file)
                self._ask(file)

    @property
    def _room(self) -> bool:
        documents = self._documents
        return self._drawing < 2 * documents._processes and self._nbytes < documents._ahead_bytes

    def _refusal(self, document: Document) -> str | None:
        most = self._documents._settings.max_bytes
        if len(document.data) > most:
            return f"more than {most} bytes"
        return None if document.data else "empty"

    def _ask(self, file: _File) -> None:
        """Ask for the file's next pages, while there is room; for the first row in any case."""
        if file.pages is None and file.asked and file.asked[0][1].done():
            self._learn(file, file.asked[0][1].result())
        while not file.over and (self._room or (file is self._waiting[0] and not file.asked)):
            if file.pages is None and file.asked:
                # How many there are comes with the first.
                return
            page = file.next_page
            file.next_page += 1
            left_out = self._done(file.page_id(page), file.page_hash(page))
            if left_out and file.pages is not None:
                continue
            with self._lock:
                self._drawing += 1
            number = None if left_out else page
            file.asked.append((number, self._documents._threads.submit(self._drawn, file, number)))

    def _drawn(self, file: _File, page: int | None) -> _Outcome:
        """On a thread: a page, or how many there are."""
        outcome: _Outcome | None = None
        try:
            try:
                outcome = self._documents._draw(file, page)
            except ProcessLost as loss:
                outcome = self._lost(file, page, loss)
            return outcome
        finally:
            with self._lock:
                self._drawing -= 1
                self._nbytes += 0 if outcome is None else _nbytes(outcome)

    def _lost(self, file: _File, page: int | None, loss: ProcessLost) -> _Lost:
        seconds = self._documents._settings.seconds
        reason = {
            "crash": "its renderer crashed",
            "timeout": f"not drawn within {seconds:g} seconds of processor time",
        }[loss.why]
        if file.pages is not None or page is None:
            return _Lost(reason=reason, pages=file.pages)
        # Only the page may be bad, and the file have others.
        try:
            return _Lost(reason=reason, pages=self._documents._draw(file, None).pages)
        except ProcessLost:
            return _Lost(reason=reason)

    def _count(self, row: Item | Failure, sign: int) -> None:
        if isinstance(row, Item):
            with self._lock:
                self._nbytes += sign * row.nbytes


def _nbytes(outcome: _Outcome) -> int:
    return len(outcome.picture) + len(outcome.text) if isinstance(outcome, Drawn) else 0
