"""Sources one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tessera_corpus.item import Row, Source
from tessera_corpus.sources.counted import Position

# What sources count themselves in differs: each is so much of the whole.
_WEIGHT: Final = 1_000_000


@dataclass(slots=True)
class Chain:
    """Sources one after another."""

    sources: Sequence[Source]

    def position(self) -> Position:
        read = 0
        for source in self.sources:
            position = source.position()
            read += position.read * _WEIGHT // position.most if position.most else 0
        return Position(read=read, most=_WEIGHT * len(self.sources))

    def gives(self, id: str, place: str, page: int | None) -> bool:
        return any(source.gives(id, place, page) for source in self.sources)

    def passed_over(self) -> Mapping[str, int]:
        return sum((Counter(source.passed_over()) for source in self.sources), Counter[str]())

    def rows(self) -> Iterator[Row]:
        for source in self.sources:
            yield from source.rows()
