"""A token bucket, for rates."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class TokenBucket:
    """Holds at most ``capacity`` tokens, begins full, and gains ``per_second``. Owned by one event loop.

    ``take`` may leave a debt, which is paid off before there is anything to take again.
    """

    def __init__(self, capacity: float, per_second: float, clock: Clock = time.monotonic) -> None:
        self._capacity = capacity
        self._per_second = per_second
        self._clock = clock
        self._level = capacity
        self._at = clock()

    def wait(self, amount: float = 0.0) -> float:
        """Seconds until more than nothing, and as much as ``amount`` or a full bucket, is there; 0 if now."""
        level = self._refilled()
        if level > 0 and level >= min(amount, self._capacity):
            return 0.0
        return max(0.001, (amount - level) / self._per_second)

    def take(self, amount: float) -> None:
        """Take ``amount`` even if that is more than there is."""
        self._level -= amount

    def take_if_there(self, amount: float) -> bool:
        """Take ``amount``; false, and nothing taken, when there is less."""
        if self._refilled() < amount:
            return False
        self._level -= amount
        return True

    def give(self, amount: float) -> None:
        """Add tokens beside those that time brings; what is over the capacity is lost."""
        self._level = min(self._capacity, self._level + amount)

    def _refilled(self) -> float:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
        self._at = now
        return self._level
