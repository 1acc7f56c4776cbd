"""How much of a worker's room the frontends of each host may fill."""

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
        """In tokens or units; at least ``least``, as far as there is so much at all."""
        return max(room // self.parts, min(room, least))


class FrontendShares:
    """What each of the callers that ask may send to this worker; those that asked lately are counted.

    A caller is one frontend, or all that answer on one port: those count together what they have let in.

    A frontend refuses what is beyond its workers' room before it reads it. If each were told of all the room,
    two would let in twice as much, and the worker would refuse half of it after it had been tokenised.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}

    def of(self, caller: str) -> Share:
        """The share of the caller of that name, which has asked now; all for one without a name."""
        if not caller:
            return Share(1)
        now = self._asked[caller] = self._clock()
        self._asked = {name: at for name, at in self._asked.items() if now - at <= _MEMORY_SECONDS}
        return Share(len(self._asked))
