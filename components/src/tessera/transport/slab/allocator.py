"""Which ranges of a fixed space are free."""

from __future__ import annotations

from bisect import bisect_left


class RangeAllocator:
    """First-fit ranges of ``size`` units, neighbours merged when they are given back.

    Knows nothing of memory: it hands out numbers. Not thread-safe.
    """

    def __init__(self, size: int) -> None:
        if size <= 0:
            raise ValueError(f"an allocator needs at least one unit, not {size}")
        self.size = size
        self.used = 0
        # Both sorted by start and never touching each other: a gap shorter than a request is the only
        # reason why a free range is skipped.
        self._starts = [0]
        self._lengths = [size]

    def take(self, length: int) -> int | None:
        """Reserve ``length`` units in a row; their start, or None when no gap is long enough."""
        if length <= 0:
            raise ValueError(f"cannot take {length} units")
        for index, gap in enumerate(self._lengths):
            if gap < length:
                continue
            start = self._starts[index]
            if gap == length:
                del self._starts[index], self._lengths[index]
            else:
                self._starts[index] += length
                self._lengths[index] -= length
            self.used += length
            return start
        return None

    def give(self, start: int, length: int) -> None:
        """Return a range that ``take`` handed out, as a whole."""
        index = bisect_left(self._starts, start)
        end = start + length
        before = index > 0 and self._starts[index - 1] + self._lengths[index - 1]
        if (
            length <= 0
            or start < 0
            or end > self.size
            or (index > 0 and before > start)
            or (index < len(self._starts) and self._starts[index] < end)
        ):
            raise ValueError(f"units {start}..{end} are not taken")
        self.used -= length
        joins_before = index > 0 and before == start
        joins_after = index < len(self._starts) and self._starts[index] == end
        if joins_before and joins_after:
            self._lengths[index - 1] += length + self._lengths[index]
            del self._starts[index], self._lengths[index]
        elif joins_before:
            self._lengths[index - 1] += length
        elif joins_after:
            self._starts[index] = start
            self._lengths[index] += length
        else:
            self._starts.insert(index, start)
            self._lengths.insert(index, length)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The free ranges as (start, length), in order."""
        return tuple(zip(self._starts, self._lengths, strict=True))
