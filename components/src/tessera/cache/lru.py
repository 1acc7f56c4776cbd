"""Least-recently-used caches: one of any values, and the one of vision rows with its counters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedLru(Generic[K, V]):
    """Keeps values of at most ``capacity`` in all; those that were used least recently make room.

    ``weigh`` says what a value counts for; by default each counts for one. Not thread-safe.
    """

    def __init__(self, capacity: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self.capacity = capacity
        self._weigh = weigh
        self._values: OrderedDict[K, V] = OrderedDict()
        self._used = 0

    @property
    def used(self) -> int:
        """What the values count for, in all."""
        return self._used

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; None where there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> int:
        """Store a value, as the one used last; returns how many others made room.

        A value that counts for more than the capacity is not stored.
        """
        self.pop(key)
        weight = self._weigh(value)
        if weight > self.capacity:
            return 0
        evicted = 0
        while self._used + weight > self.capacity:
            _, oldest = self._values.popitem(last=False)
            self._used -= self._weigh(oldest)
            evicted += 1
        self._values[key] = value
        self._used += weight
        return evicted

    def pop(self, key: K) -> V | None:
        """Take the value out; None where there is none."""
        if key not in self._values:
            return None
        value = self._values.pop(key)
        self._used -= self._weigh(value)
        return value


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
    """Maps a content key to rows ``[rows, row_width]`` in host memory; bounded by ``capacity`` in bytes.

    Rows are handed out without a copy and must not be written to; an evicted entry stays alive for as long
    as a batch uses it. Owned by one event loop. A capacity of 0 stores nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._rows: BoundedLru[bytes, torch.Tensor] = BoundedLru(capacity, lambda rows: rows.nbytes)
        self._hits = self._misses = self._evictions = self._refused = 0

    def holds(self, *keys: bytes) -> bool:
        """Whether ``get`` would find rows; counts as no lookup."""
        return any(key in self._rows for key in keys)

    def get(self, *keys: bytes) -> torch.Tensor | None:
        """The rows under the first key that has some; counts as one lookup."""
        for key in keys:
            if (rows := self._rows.get(key)) is not None:
                self._hits += 1
                return rows
        self._misses += 1
        return None

    def put(self, key: bytes, rows: torch.Tensor) -> bool:
        """Store the rows; false when they are larger than the cache."""
        if rows.nbytes > self._rows.capacity:
            self._refused += 1
            return False
        self._evictions += self._rows.put(key, rows)
        return True

    def stats(self) -> CacheStats:
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refused=self._refused,
            entries=len(self._rows),
            nbytes=self._rows.used,
            capacity=self._rows.capacity,
        )
