"""The frontends among which a worker's room is divided."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Frontends ask every second; one that has not for this long is gone.
_MEMORY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``parts`` equal parts."""

    parts: int

    def of(self, room: int, *, least: int) -> int:
        """In tokens or tiles; at least ``least``, as far as there is so much at all."""
        return max(room // self.parts, min(room, least))


class Callers:
    """Who has asked what this worker is, lately.

    Each frontend refuses what is beyond its workers' room before it reads it. Were each told of all the room,
    two would let in twice as much, and the worker would refuse half of it once it had been made into tokens.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}

    def share(self, caller: str) -> Share:
        """What the caller gets, counted as one of them; all of it for one without a name."""
        if not caller:
            return Share(1)
        now = self._asked[caller] = self._clock()
        self._asked = {name: at for name, at in self._asked.items() if now - at <= _MEMORY_SECONDS}
        return Share(len(self._asked))
