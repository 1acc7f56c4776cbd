"""What a corpus is made of: items to embed, documents that become items, and what could not be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec
from blake3 import blake3

from tessera.local.content import Part, nbytes_of
from tessera.models.base import Role
from tessera.rows import Rows
from tessera_corpus.sources.counted import Position


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Says which item something is of, and where that was read.

    ``id`` is unique in a run. ``source`` is the place as a person looks it up; ``page`` counts from 1 where
    it has pages. ``place`` is that of an input in its request, from 0, and its id is ``REQUEST#place`` then.
    """

    id: str
    source: str
    page: int | None = None
    place: int | None = None

    def failed(self, reason: str) -> Failure:
        return Failure(id=self.id, source=self.source, page=self.page, place=self.place, reason=reason)


class Hashed(Origin, frozen=True, kw_only=True):
    """Has what stays of an item whatever becomes of it.

    ``content_hash`` is the 32-byte blake3 hash of what is embedded: the same parts for the same role have the
    same hash under every id. Who makes a part of something larger, a page of a document, gives a hash of
    that and of how it was made. ``warning`` says what of it could not be shown.
    """

    content_hash: bytes = b""
    warning: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """These fields by name."""
        return {name: getattr(self, name) for name in Hashed.__struct_fields__}


class Item(Hashed, frozen=True, kw_only=True, tag=True):
    """One thing to embed: its texts and images, in the order in which they are read as one.

    ``role`` is what it is for, None for what the run says, and ``instruction`` what its prompt says in place
    of the model's own, where the family knows them.
    """

    parts: tuple[Part, ...]
    role: Role | None = None
    instruction: str | None = None

    def __post_init__(self) -> None:
        if not self.nbytes:
            raise ValueError("an item needs a text or an image")
        if not self.content_hash:
            msgspec.structs.force_setattr(
                self, "content_hash", _hash(self.parts, self.role, self.instruction)
            )

    @property
    def nbytes(self) -> int:
        """Of its texts, one for each character, and images."""
        return nbytes_of(self.parts)

    def embedded(self, rows: Rows, tokens: int) -> Embedded:
        """``rows`` and ``tokens`` as ``Embedded`` has them."""
        return Embedded(**self.identity, rows=rows, tokens=tokens)


def _hash(parts: tuple[Part, ...], role: Role | None, instruction: str | None) -> bytes:
    digest = blake3((role or "").encode() + b"\0")
    given = () if instruction is None else (instruction,)
    for part in (*given, *parts):
        data = part.encode() if isinstance(part, str) else part.data
        # Kind and length keep parts apart: bytes cannot move from one to the next.
        digest.update(b"text" if isinstance(part, str) else b"file")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


class Document(Origin, frozen=True, kw_only=True, tag=True):
    """A file with pages, a PDF, each of which is to become an item; ``id`` is that of the file."""

    data: bytes


class Failure(Origin, frozen=True, kw_only=True, tag=True):
    """What could not become an item or a vector, and why; the run goes on without it."""

    reason: str


Row = Item | Document | Failure

DUPLICATE: Final = "the id was there before"
"""The reason of an item that has the id of another, which has its vector."""

# Of a row that is waiting, beside what it holds.
_ROW_BYTES: Final = 1024


def size_of(row: Row) -> int:
    """Bytes that a row takes."""
    if isinstance(row, Failure):
        return _ROW_BYTES
    return _ROW_BYTES + (len(row.data) if isinstance(row, Document) else row.nbytes)


class Source(Protocol):
    """Where items come from."""

    def position(self) -> Position:
        """How far its rows have been read."""
        ...

    def gives(self, id: str, place: str, page: int | None) -> bool:
        """Whether an item of this id, read from this place, would be this source's if it were there."""
        ...

    def passed_over(self) -> Mapping[str, int]:
        """How many files so far are not read, by their kind."""
        ...

    def rows(self) -> Iterator[Row]:
        """Every row, in the same order each time while nothing changes; it raises for the whole source."""
        ...


class Embedded(Hashed, frozen=True, kw_only=True, eq=False):
    """An item's rows, of its outputs in the order of the output's columns, and its token count."""

    rows: Rows
    tokens: int


def request_of(id: str, place: int | None) -> str:
    """The request that an input is of; an item that is no input is one of its own."""
    return id if place is None else id.removesuffix(f"#{place}")


def file_of(id: str, page: int | None) -> str:
    """The id of the file that a page is of; that of an item without pages is its own."""
    return id if page is None else id.removesuffix(f"#page={page}")


DIGEST_BYTES: Final = 16


def digest_of(id: str) -> bytes:
    """``DIGEST_BYTES`` that stand for an id."""
    return blake3(id.encode()).digest(DIGEST_BYTES)


def unique(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows with each later item of an id that was there replaced by a failure.

    A digest of each id stays in memory, not the place it was read from.
    """
    seen: set[bytes] = set()
    for row in rows:
        if not isinstance(row, Failure):
            key = digest_of(row.id)
            if key in seen:
                row = row.failed(DUPLICATE)
            seen.add(key)
        yield row
