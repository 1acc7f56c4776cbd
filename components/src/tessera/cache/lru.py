"""A least-recently-used cache of vision rows, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since the start; ``nbytes`` and ``entries`` are of now."""

    hits: int
    misses: int
    evictions: int
    refused: int
    entries: int
    nbytes: int
    capacity: int


class EmbeddingCache:
    """Maps a content key to rows ``[rows, hidden]`` in host memory.

    Rows are handed out without a copy and must not be written to; an evicted entry stays alive for as long
    as a batch uses it. Not thread-safe: it belongs to one event loop. A capacity of 0 stores nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._nbytes = 0
        self._hits = self._misses = self._evictions = self._refused = 0

    def get(self, *keys: bytes) -> torch.Tensor | None:
        """What is there under the first key that has something; counts as one lookup."""
        key = next((key for key in keys if key in self._entries), None)
        if key is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: bytes, rows: torch.Tensor) -> bool:
        """Store the rows, evicting the least recently used; false when they are larger than the cache."""
        if rows.nbytes > self._capacity:
            self._refused += 1
            return False
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self._nbytes -= replaced.nbytes
        while self._nbytes + rows.nbytes > self._capacity:
            _, evicted = self._entries.popitem(last=False)
            self._nbytes -= evicted.nbytes
            self._evictions += 1
        self._entries[key] = rows
        self._nbytes += rows.nbytes
        return True

    def stats(self) -> CacheStats:
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refused=self._refused,
            entries=len(self._entries),
            nbytes=self._nbytes,
            capacity=self._capacity,
        )
