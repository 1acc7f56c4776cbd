"""The seam of formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from tessera_corpus.item import Origin
from tessera_corpus.output.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Some rows of ``part``: their ids and, in the same order, their content hashes."""

    part: str
    ids: Sequence[str]
    content_hashes: Sequence[bytes]


class Table(Protocol):
    """The rows of one format in a directory. A method that is killed has done all of its work or none."""

    def published(self) -> Iterator[Published]:
        """What is there, of all shards. Raises ``ConfigError`` for what cannot be read."""
        ...

    def append(self, rows: Sequence[Row]) -> None:
        """Publish the rows as a part. Raises ``OutputFailed``."""
        ...

    def origins(self, part: str) -> Iterator[Origin]:
        """The items of a part, as far as the format says where they were read."""
        ...

    def remove(self, part: str, ids: Set[str]) -> None:
        """Take the rows of these ids out of a part. Raises ``OutputFailed``."""
        ...
