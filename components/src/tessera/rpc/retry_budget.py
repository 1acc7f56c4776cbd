"""How many calls may be made again."""

from __future__ import annotations

import time
from collections.abc import Callable


class RetryBudget:
    """A token bucket: every first call pays for ``ratio`` of a retry, and time for ``per_second`` more.

    It holds ``burst`` at most and begins full, so that the calls inside a worker that dies can all move at
    once, while a lasting brown-out adds no more than that share of load. Owned by one event loop.
    """

    def __init__(
        self,
        *,
        ratio: float = 0.2,
        per_second: float = 10.0,
        burst: float = 1024.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ratio = ratio
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._at = clock()

    def called(self, count: int = 1) -> None:
        """Account for first calls."""
        self._level = min(self._burst, self._level + self._ratio * count)

    def take(self, count: int = 1) -> bool:
        """Spend retries; false, and nothing spent, when there are not so many."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_second)
        self._at = now
        if self._level < count:
            return False
        self._level -= count
        return True
