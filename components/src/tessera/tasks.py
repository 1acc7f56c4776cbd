"""Time that is left, and waiting for what cannot call back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from tessera.errors import DeadlineExceeded

_SPIN_SECONDS: Final = 3e-4


class Poll:
    """Pauses between two looks at something that is under way.

    The event loop's clock wakes a sleeper a millisecond late at worst, which is longer than most
    hand-offs: at first it only gives other tasks their turn, and sleeps once that has lasted a while.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    async def pause(self) -> None:
        await asyncio.sleep(0 if self.elapsed < _SPIN_SECONDS else 1e-3)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock. Other processes are told what is left, never the point."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds; raises ``DeadlineExceeded`` when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request was not answered in time")
        return left
