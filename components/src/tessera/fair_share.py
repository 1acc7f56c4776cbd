"""A bounded amount of work, shared fairly between the clients who bring it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_FACTOR: Final = 4


class Budget:
    """Counts what is in use, in tokens or units, against a limit that may change at any time.

    A client may hold at most four times what it leaves free (dynamic thresholds: Choudhury and Hahne, 1998):
    one alone gets four fifths of the limit, two get four ninths each, and the last to come finds room in
    what the others had to leave. Unnamed clients (``""``) are not told apart and share the whole. Owned by
    one event loop.
    """

    __slots__ = ("_held", "_limit", "_used")

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._used = 0
        self._held: dict[str, int] = {}

    @property
    def used(self) -> int:
        return self._used

    @property
    def limit(self) -> int:
        return self._limit()

    def held(self, client: str) -> int:
        """What a named client has in use."""
        return self._held.get(client, 0)

    def admits(self, client: str, amount: int) -> bool:
        """Whether ``take`` would keep to the rules; a first piece of any size always does."""
        if not self._used:
            return True
        free = self._limit() - self._used
        if amount > free:
            return False
        held = self._held.get(client, 0) if client else 0
        return not held or held + amount <= _FACTOR * (free - amount)

    def take(self, client: str, amount: int) -> None:
        self._used += amount
        if client:
            self._held[client] = self._held.get(client, 0) + amount

    def give(self, client: str, amount: int) -> None:
        self._used -= amount
        if client:
            left = self._held.get(client, 0) - amount
            if left > 0:
                self._held[client] = left
            else:
                self._held.pop(client, None)
