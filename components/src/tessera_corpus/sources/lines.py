"""JSON lines: plain objects, and the lines of an OpenAI batch."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

import orjson

from tessera.errors import ConfigError, InvalidInput, RequestError
from tessera.frontend.request import EmbeddingsRequest, ImageSource, Input
from tessera.local.content import ImageFile, Part
from tessera.model_names import find_name
from tessera.models.base import Truncate
from tessera_corpus.item import Document, Failure, Item, Row, file_of
from tessera_corpus.shard import Shard
from tessera_corpus.sources.ahead import Work, ahead
from tessera_corpus.sources.counted import Counted
from tessera_corpus.sources.folder import DOCUMENTS
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.pictures import has_pages, picture_rows

_CHUNK: Final = 1 << 20
_PDF: Final = b"%PDF-"
_ROUTE: Final = "/v1/embeddings"
# A name that could be an input's of another request.
_LIKE_AN_INPUT: Final = re.compile(r".+#(0|[1-9][0-9]*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Honoured:
    """What a batch line may ask for, because the run does it anyway."""

    models: Collection[str]
    dimensions: int
    truncate: Truncate = Truncate.NONE


@dataclass(slots=True, kw_only=True)
class Lines(Counted):
    """The lines of a file, or of standard input.

    A plain line is an object with ``text``, ``image`` (a path, a URL or a data URL, or a list of them) or
    both, and an ``id``: without one FILE:LINE. The images of a list are one input. An image that ends in .pdf
    is a document. Other keys mean nothing. A batch line has a ``custom_id`` and a ``body`` for
    ``/v1/embeddings``; of several inputs each is ``CUSTOM_ID#N``, from 0, and so is a single one whose
    ``CUSTOM_ID`` could be the id of another's input. What cannot be read is a failure that names the line,
    and reading goes on behind it. What batch lines ask for is checked where ``honoured`` says what the run
    does.
    """

    name: str
    path: Path | None
    media: Media
    honoured: Honoured | None
    max_bytes: int
    shard: Shard

    def gives(self, id: str, place: str, page: int | None) -> bool:
        name, _, number = place.rpartition(":")
        if self.path is None or name != self.name or not number.isdecimal():
            return False
        if self.shard.count > 1 and _LIKE_AN_INPUT.fullmatch(id) is not None:
            # Whose shard is that of its request, if it is an input.
            return False
        return self.shard.holds(file_of(id, page))

    def rows(self) -> Iterator[Row]:
        """Raises ``ConfigError`` where standard input cannot be read; a file is a failure of its own then."""
        try:
            with _opened(self.path) as file:
                if self.path is not None:
                    self._most = os.fstat(file.fileno()).st_size
                yield from ahead(self._works(file))
        except OSError as error:
            if self.path is None:
                raise ConfigError(f"{self.name}: {error.strerror}") from None
            self._read = self._most = max(self._most, 1)
            yield from self._failed(self.name, self.name, error.strerror or type(error).__name__)

    def at(self, number: int) -> Sequence[Row]:
        """The rows of one line, from 1; none behind the end. Raises ``ConfigError`` as ``rows`` does."""
        try:
            with _opened(self.path) as file:
                for _ in range(number - 1):
                    while (chunk := file.readline(_CHUNK)) and not chunk.endswith(b"\n"):
                        pass
                line = file.readline(self.max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{self.name}: {error.strerror}") from None
        work = self._line(line, f"{self.name}:{number}") if _written(line) else []
        return work() if callable(work) else work

    def _works(self, file: BinaryIO) -> Iterator[Work]:
        number = 0
        while line := file.readline(self.max_bytes + 1):
            number += 1
            self._read += len(line)
            where = f"{self.name}:{number}"
            if len(line) > self.max_bytes and not line.endswith(b"\n"):
                while (more := file.readline(_CHUNK)) and not more.endswith(b"\n"):
                    self._read += len(more)
                yield self._failed(where, where, f"more than {self.max_bytes} bytes")
            elif _written(line):
                yield self._line(line, where)

    def _line(self, line: bytes, where: str) -> Work:
        try:
            # Some editors begin a file with it, and such files are put together.
            value = orjson.loads(line.removeprefix(codecs.BOM_UTF8))
        except ValueError as error:
            return self._failed(where, where, f"not JSON: {error}")
        if not isinstance(value, dict):
            return self._failed(where, where, "a line must be a JSON object")
        if "custom_id" in value or "body" in value:
            return self._batch(value, where)
        id = value.get("id")
        if id is not None and (isinstance(id, bool) or not isinstance(id, str | int) or id == ""):
            return self._failed(where, where, "id: expected a text or a number")
        return self._plain(str(where if id is None else id), value, where)

    def _plain(self, id: str, value: dict[str, Any], where: str) -> Work:
        if not self.shard.holds(id):
            return []
        text, image = value.get("text"), value.get("image")
        if text is not None and not isinstance(text, str):
            return self._failed(id, where, "text: expected a text")
        images = image if isinstance(image, list) else [image] if image else []
        if not all(isinstance(each, str) and each for each in images):
            return self._failed(id, where, "image: expected a text, or a list of texts")
        if not images and not (text or "").strip():
            return self._failed(id, where, "neither text nor image")
        if images:
            return lambda: made_of(id, where, text or "", images, self.media)
        return [Item(id=id, source=where, parts=(text or "",))]

    def _batch(self, value: dict[str, Any], where: str) -> Work:
        id, body = value.get("custom_id"), value.get("body")
        if not isinstance(id, str) or not id:
            return self._failed(where, where, "custom_id: expected a text")
        if not self.shard.holds(id):
            return []
        if value.get("method", "POST") != "POST" or value.get("url", _ROUTE) != _ROUTE:
            return self._failed(id, where, f"only POST {_ROUTE} is served here")
        # Here alone: the routes come with it, which most runs have no use for.
        from tessera.frontend.api.openai import parse_embeddings

        try:
            request = parse_embeddings(body, models=self.honoured.models if self.honoured else ())
            if request.inputs[0].chunked:
                raise InvalidInput("late_chunking: every input is embedded by itself here")
            if self.honoured is not None:
                _check(request, self.honoured)
        except InvalidInput as error:
            return self._failed(id, where, str(error))
        numbered = len(request.inputs) > 1 or _LIKE_AN_INPUT.fullmatch(id) is not None

        def read() -> list[Row]:
            return [
                self._input(f"{id}#{number}" if numbered else id, number if numbered else None, entry, where)
                for number, entry in enumerate(request.inputs)
            ]

        return read if any(entry.images for entry in request.inputs) else read()

    def _input(self, id: str, place: int | None, entry: Input, where: str) -> Row:
        parts: list[Part] = []
        try:
            for part in entry.parts:
                if isinstance(part, str):
                    parts.append(part)
                elif isinstance(part, ImageSource) and part.url and not part.embeddings:
                    parts.append(ImageFile(self.media.read(part.url)))
                else:
                    raise InvalidInput("only texts and images are embedded in bulk: no token ids, no tensors")
            return Item(
                id=id,
                source=where,
                place=place,
                parts=tuple(parts),
                role=entry.role,
                instruction=entry.instruction,
            )
        except RequestError as error:
            return Failure(id=id, source=where, place=place, reason=str(error))

    def _failed(self, id: str, where: str, reason: str) -> list[Row]:
        return [Failure(id=id, source=where, reason=reason)] if self.shard.holds(id) else []


def _check(request: EmbeddingsRequest, honoured: Honoured) -> None:
    if request.model is not None and find_name(request.model, honoured.models) is None:
        raise InvalidInput(f"model: {request.model!r} is not the run's")
    if request.dimensions not in (None, honoured.dimensions):
        raise InvalidInput(f"dimensions: the run makes {honoured.dimensions} of every vector")
    cut = honoured.truncate
    # A line that names no side leaves it to the run.
    sides = {Truncate.NONE, cut} if cut is Truncate.NONE else {Truncate.NONE, Truncate.DECLARED, cut}
    if request.truncate not in sides:
        raise InvalidInput(f"truncate: the run has {cut.value}, see --truncate")
    if not request.normalize:
        raise InvalidInput("normalize: the run makes unit vectors")


def made_of(
    id: str, source: str, text: str, images: Sequence[str | ImageFile], media: Media, page: int | None = None
) -> list[Row]:
    """The rows of a text and of images, which are one input; an image is a file, or what names it."""

    def failed(reason: str) -> list[Row]:
        return [Failure(id=id, source=source, page=page, reason=reason)]

    try:
        files = [media.read(image) if isinstance(image, str) else image.data for image in images]
    except RequestError as error:
        return failed(str(error))
    if not all(files):
        return failed("image: empty")
    beside = (text,) if text.strip() else ()
    documents = any(map(_is_document, images, files))
    if len(files) == 1 and documents:
        if beside:
            return failed("a document has texts of its own, and there is one beside it")
        return [Document(id=id, source=source, data=files[0])]
    if len(files) == 1:
        return picture_rows(id, source, files[0], text=text, page=page)
    if documents or any(map(has_pages, files)):
        return failed("a file of several pages among several images")
    parts = (*map(ImageFile, files), *beside) if files else (text,)
    return [Item(id=id, source=source, page=page, parts=parts)]


def _is_document(image: str | ImageFile, data: bytes) -> bool:
    named = isinstance(image, str) and PurePosixPath(urlsplit(image[:4096]).path).suffix.lower() in DOCUMENTS
    return named or data.startswith(_PDF)


def _written(line: bytes) -> bool:
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def _opened(path: Path | None) -> BinaryIO:
    # A descriptor of its own: closing the run's rows does not close standard input.
    return open(os.dup(0), "rb") if path is None else open(path, "rb")
