"""Which items of a table have their vectors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from tessera_corpus.item import DIGEST_BYTES, digest_of
from tessera_corpus.output.table import Published

# 36 bytes an item.
_ENTRY: Final = np.dtype([("id", f"S{DIGEST_BYTES}"), ("content", f"S{DIGEST_BYTES}"), ("part", np.uint32)])


class Known:
    """The items of a table as it was at the start; of each, 16 bytes of the hashes of id and content."""

    def __init__(self, published: Iterable[Published]) -> None:
        blocks = [np.empty(0, _ENTRY)]
        places: dict[str, int] = {}
        for rows in published:
            block = np.empty(len(rows.ids), _ENTRY)
            block["id"] = [digest_of(id) for id in rows.ids]
            block["content"] = [content[:DIGEST_BYTES] for content in rows.content_hashes]
            block["part"] = places.setdefault(rows.part, len(places))
            blocks.append(block)
        self._parts = list(places)
        entries = np.concatenate(blocks)
        blocks.clear()
        order = np.argsort(entries["id"])
        # Columns apart, so that a search reads neighbours.
        self._ids = entries["id"][order]
        self._contents = entries["content"][order]
        self._places = entries["part"][order]
        self._met = np.zeros(len(order), bool)

    def __len__(self) -> int:
        return len(self._ids)

    def has(self, id: str, content_hash: bytes) -> bool:
        place = self._find(id)
        # Bytes of numpy end before their zeros.
        return place is not None and bool(self._contents[place] == content_hash[:DIGEST_BYTES].rstrip(b"\0"))

    def meet(self, id: str) -> None:
        """Note that an item is still there."""
        if (place := self._find(id)) is not None:
            self._met[place] = True

    def unmet(self, id: str) -> bool:
        """Whether an item was there at the start, and was not met since."""
        place = self._find(id)
        return place is not None and not self._met[place]

    def unmet_parts(self) -> list[str]:
        """The parts with such items."""
        return [self._parts[place] for place in np.unique(self._places[~self._met]).tolist()]

    def part_of(self, id: str) -> str | None:
        """The part that an item is in, with whatever content."""
        place = self._find(id)
        return None if place is None else self._parts[self._places[place]]

    def _find(self, id: str) -> int | None:
        if not len(self._ids):
            return None
        digest = digest_of(id).rstrip(b"\0")
        place = int(np.searchsorted(self._ids, digest))
        return place if place < len(self._ids) and self._ids[place] == digest else None
