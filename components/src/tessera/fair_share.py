"""A bounded amount of work, divided: among clients by a budget, among frontends in equal parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FACTOR: Final = 4


class Budget:
    """Counts what is in use, in tokens or tiles, against a limit that may change at any time.

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


# Frontends ask every second; one that has not for this long is gone.
_MEMORY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``parts`` equal parts."""

    parts: int

    def of(self, room: int, *, least: int) -> int:
        """In tokens or tiles; at least ``least``, as far as there is so much at all."""
        return max(room // self.parts, min(room, least))


class FrontendShares:
    """What each of the frontends that ask may send to this worker; those that asked lately are counted.

    A frontend refuses what is beyond its workers' room before it reads it. If each were told of all the room,
    two would let in twice as much, and the worker would refuse half of it after it had been tokenised.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}

    def of(self, caller: str) -> Share:
        """The share of the frontend of that name, which has asked now; all for one without a name."""
        if not caller:
            return Share(1)
        now = self._asked[caller] = self._clock()
        self._asked = {name: at for name, at in self._asked.items() if now - at <= _MEMORY_SECONDS}
        return Share(len(self._asked))
