"""Vectors as the lines of an OpenAI batch's output file.

An item is a line, its id the ``custom_id``. Inputs of one request share its line. Beside what OpenAI writes,
each vector has the ``content_hash`` and the ``tokens`` of its input. Further outputs stand beside the vector
as ``/v1/embeddings`` answers them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from tessera.errors import ConfigError
from tessera.models.base import OutputKind
from tessera_corpus.item import Failure, Origin, digest_of, request_of
from tessera_corpus.output.directory import Directory
from tessera_corpus.output.row import VECTOR, Column, Row, VectorKind
from tessera_corpus.output.table import Published

ENDING: Final = ".jsonl"


# An ``embedding`` where there is no vector: clients expect one.
_NONE: Final = msgspec.Raw(b"[]")


class Vector(msgspec.Struct, kw_only=True):
    """``index`` is the input's place in the request."""

    object: str = "embedding"
    index: int
    embedding: msgspec.Raw = _NONE
    sparse_embedding: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    multi_vector: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    content_hash: str
    tokens: int
    warning: str | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    total_tokens: int = 0


class Body(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Vector]
    model: str
    usage: Usage = msgspec.field(default_factory=Usage)


class Response(msgspec.Struct, kw_only=True):
    status_code: int = 200
    request_id: str
    body: Body


class Line(msgspec.Struct, kw_only=True):
    """``several`` tells one input of a request with a list from one that is no list."""

    id: str
    custom_id: str
    response: Response
    error: None = None
    several: bool = msgspec.field(default=False, name="input_is_list")

    def id_of(self, vector: Vector) -> str:
        return f"{self.custom_id}#{vector.index}" if self.several else self.custom_id


class _Hash(msgspec.Struct):
    index: int
    content_hash: str


class _HashesBody(msgspec.Struct):
    data: list[_Hash]


class _HashesResponse(msgspec.Struct):
    body: _HashesBody


class _Hashes(msgspec.Struct):
    """A line without its vectors, which are passed over."""

    custom_id: str
    response: _HashesResponse
    input_is_list: bool = False


class LinesTable:
    """``DIR/vectors/*.jsonl``.

    A request's inputs may come at any time: where its line is published already, it is taken out of its part
    and published again with all of them.
    """

    def __init__(self, directory: Directory, kind: VectorKind) -> None:
        self._directory = directory
        self._kind = kind
        self._number = directory.next_part(ENDING)
        # Of lines with several inputs: the part of each.
        self._parts: dict[bytes, str] = {}

    def published(self) -> Iterator[Published]:
        decoder = msgspec.json.Decoder(_Hashes)
        for path in sorted(self._directory.vectors.glob(f"*{ENDING}")):
            ids, hashes = [], []
            try:
                with open(path, "rb") as file:
                    for line in map(decoder.decode, file):
                        if line.input_is_list:
                            self._parts[digest_of(line.custom_id)] = path.name
                        for vector in line.response.body.data:
                            ids.append(
                                f"{line.custom_id}#{vector.index}" if line.input_is_list else line.custom_id
                            )
                            hashes.append(bytes.fromhex(vector.content_hash))
            except FileNotFoundError:
                # Another shard took its last row out.
                continue
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: not a part that can be read: {error}") from error
            yield Published(part=path.name, ids=ids, content_hashes=hashes)

    def append(self, rows: Sequence[Row]) -> None:
        # An item may be called what a request is.
        requests: dict[tuple[str, bool], dict[int, Vector]] = defaultdict(dict)
        for row in rows:
            place = row.place or 0
            key = request_of(row.id, row.place), row.place is not None
            requests[key][place] = self._vector(row, place)
        several = {name for name, several in requests if several}
        for line in self._take(several):
            key = line.custom_id, True
            requests[key] = {vector.index: vector for vector in line.response.body.data} | requests[key]
        path = self._directory.part(self._number, ENDING)
        lines = (self._line(name, vectors, several) for (name, several), vectors in requests.items())
        self._directory.publish(path, lambda temporary: _write(temporary, lines))
        self._parts |= {digest_of(name): path.name for name in several}
        self._number += 1

    def origins(self, part: str) -> Iterator[Origin]:
        # Its lines are a batch's, which do not say it.
        yield from ()

    def remove(self, part: str, ids: Set[str]) -> None:
        def kept(line: Line) -> bool:
            body = line.response.body
            body.data = [vector for vector in body.data if line.id_of(vector) not in ids]
            body.usage = _usage(body.data)
            return bool(body.data)

        self._rewrite(part, kept)

    def _take(self, names: Set[str]) -> list[Line]:
        """Take the lines of these requests out of their parts."""
        taken: list[Line] = []

        def kept(line: Line) -> bool:
            if wanted := line.several and line.custom_id in names:
                taken.append(line)
            return not wanted

        for part in {part for name in names if (part := self._parts.get(digest_of(name))) is not None}:
            self._rewrite(part, kept)
        return taken

    def _rewrite(self, part: str, kept: Callable[[Line], bool]) -> None:
        """Keep these lines of a part, as ``kept`` leaves them."""
        path = self._directory.vectors / part
        decoder = msgspec.json.Decoder(Line)
        # Another shard may take lines of its own out of the same part.
        with self._directory.alone():
            try:
                file = open(path, "rb")  # noqa: SIM115
            except FileNotFoundError:
                return
            with file:
                lines = [line for line in map(decoder.decode, file) if kept(line)]
            if lines:
                self._directory.publish(path, lambda temporary: _write(temporary, lines))
            else:
                self._directory.remove(path)

    def _vector(self, row: Row, index: int) -> Vector:
        vectors: dict[str, Any] = {
            "embedding" if column.name == VECTOR else _KEYS[column.kind]: _written(column, values, ids)
            for column, values, ids in zip(self._kind.columns, row.values, row.ids, strict=True)
        }
        return Vector(
            index=index,
            **vectors,
            content_hash=row.content_hash.hex(),
            tokens=row.tokens,
            warning=row.warning or msgspec.UNSET,
        )

    def _line(self, name: str, vectors: Mapping[int, Vector], several: bool) -> Line:
        data = [vectors[index] for index in sorted(vectors)]
        request = digest_of(name).hex()
        return Line(
            id=f"batch_req_{request}",
            custom_id=name,
            response=Response(
                request_id=request, body=Body(data=data, model=self._kind.model, usage=_usage(data))
            ),
            several=several,
        )


# Of columns beside ``vector``.
_KEYS: Final = {
    OutputKind.VECTOR: "embedding",
    OutputKind.SPARSE: "sparse_embedding",
    OutputKind.TOKENS: "multi_vector",
}


def _written(column: Column, values: npt.NDArray[Any], ids: npt.NDArray[np.int32] | None) -> msgspec.Raw:
    found: Any = values
    if column.kind is OutputKind.SPARSE:
        found = {"indices": ids, "values": np.ascontiguousarray(values[:, 0])}
    elif column.kind is OutputKind.VECTOR:
        found = values[0]
    return msgspec.Raw(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY))


def _usage(data: Sequence[Vector]) -> Usage:
    tokens = sum(vector.tokens for vector in data)
    return Usage(prompt_tokens=tokens, total_tokens=tokens)


def _write(path: Path, lines: Iterable[Any]) -> None:
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as file:
        for line in lines:
            file.write(encoder.encode(line) + b"\n")


class _Refusal(msgspec.Struct, kw_only=True):
    """``param``, ``source`` and ``page`` stand beside what OpenAI writes."""

    code: str = "failed"
    message: str
    param: str | None
    source: str
    page: int | None


class _FailedLine(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: None = None
    error: _Refusal


def write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """The lines of an OpenAI batch's error file, one for each failed input."""

    def lines() -> Iterator[_FailedLine]:
        for failure in failures:
            name, place = request_of(failure.id, failure.place), failure.place
            yield _FailedLine(
                id=f"batch_req_{digest_of(name).hex()}",
                custom_id=name,
                error=_Refusal(
                    message=failure.reason,
                    param=None if place is None else f"input[{place}]",
                    source=failure.source,
                    page=failure.page,
                ),
            )

    _write(path, lines())


def read_failures(path: Path) -> list[Failure]:
    """Raises ``OSError`` or ``ValueError``."""
    decoder = msgspec.json.Decoder(_FailedLine)
    with open(path, "rb") as file:
        lines = [decoder.decode(line) for line in file]
    return [_failure(line.custom_id, line.error) for line in lines]


def _failure(name: str, error: _Refusal) -> Failure:
    # Written as input[N].
    place = None if error.param is None else int(error.param[6:-1])
    return Failure(
        id=name if place is None else f"{name}#{place}",
        source=error.source,
        page=error.page,
        place=place,
        reason=error.message,
    )
