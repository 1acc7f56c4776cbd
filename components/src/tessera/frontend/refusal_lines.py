"""How many lines a second are written about requests that were refused unread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_LINES_A_SECOND: Final = 10


class RefusalLines:
    """Lets the first lines of a second pass and counts the others.

    A flood is refused in a fraction of the time that a line takes: with a line for each, writing about what
    was not done would take more of a full service than refusing it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seen = 0

    def passes(self) -> bool:
        """Whether this refusal gets a line; asked once for each."""
        self._seen += 1
        return self._seen <= _LINES_A_SECOND

    def left_out(self) -> int:
        """How many got none in the second that is over; 0 until it is, and once that was told."""
        now = self._clock()
        if now - self._began < 1.0:
            return 0
        left_out = max(0, self._seen - _LINES_A_SECOND)
        self._began, self._seen = now, 0
        return left_out
