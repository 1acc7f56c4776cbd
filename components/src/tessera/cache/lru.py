"""Least-recently-used caches: one of any values, and the one of vision rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _one(_: object) -> int:
    return 1


def _nbytes(rows: torch.Tensor) -> int:
    return rows.nbytes


class BoundedLru(Generic[K, V]):
    """Keeps values of at most ``capacity`` in all; those that were used least recently make room.

    ``weigh`` says what a value counts for; by default each counts for one. ``used`` is what they count for in
    all; lookups that found a value, and that did not, values that made room and values that were refused are
    counted. Not thread-safe.
    """

    def __init__(self, capacity: int, weigh: Callable[[V], int] = _one) -> None:
        self.capacity = capacity
        self.used = 0
        self._weigh = weigh
        self._values: OrderedDict[K, V] = OrderedDict()
        self.hits = self.misses = self.evictions = self.refused = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def entries(self) -> int:
        return len(self)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, *keys: K) -> V | None:
        """Return the value of the first key that has one, which counts as used now; counts as one lookup."""
        for key in keys:
            if key in self._values:
                self._values.move_to_end(key)
                self.hits += 1
                return self._values[key]
        self.misses += 1
        return None

    def put(self, key: K, value: V) -> bool:
        """Store a value, as the one used last; false when it counts for more than the capacity."""
        weight = self._weigh(value)
        if weight > self.capacity:
            self.refused += 1
            return False
        self.pop(key)
        while self.used + weight > self.capacity:
            self.used -= self._weigh(self._values.popitem(last=False)[1])
            self.evictions += 1
        self._values[key] = value
        self.used += weight
        return True

    def pop(self, key: K) -> V | None:
        """Take the value out; None where there is none."""
        if key not in self._values:
            return None
        value = self._values.pop(key)
        self.used -= self._weigh(value)
        return value


class EmbeddingCache(BoundedLru[bytes, "torch.Tensor"]):
    """Maps a content key to rows ``[rows, row_width]`` in host memory; bounded by ``capacity`` in bytes.

    Rows are handed out without a copy and must not be written to; an evicted entry stays alive for as long
    as a batch uses it. Owned by one event loop. A capacity of 0 stores nothing.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, _nbytes)
