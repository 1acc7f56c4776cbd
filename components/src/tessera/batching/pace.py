"""When an engine that is busy wants its next batch."""

from __future__ import annotations

from typing import Final

# What a batch more leaves of the weight of those before it.
_KEPT: Final = 0.8
# Beside twice the time that launching takes. Shorter batches follow each other at once: at 1 ms, 8 texts of
# 128 tokens at once lost 3 % of their rate on an H200, where a batch of 4 runs for 3 ms.
_SPARE_SECONDS: Final = 3e-3


class _PerSize:
    """Seconds for each unit of size: of all batches together, the last ones first."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._size = 0.0

    def add(self, size: int, seconds: float) -> None:
        self._seconds = _KEPT * self._seconds + seconds
        self._size = _KEPT * self._size + size

    def seconds(self, size: int) -> float:
        """0 while nothing is known."""
        return size * self._seconds / self._size if self._size else 0.0


class Pace:
    """How long batches run and how long it takes to launch one. Used by the engine thread alone.

    A batch that is launched behind a running one as soon as it has its first entries is a small one, and ends
    before the one after it is there: 128 callers whose images are in the cache, batches of 61, kept a card
    busy for 95 % of the time. All times are readings of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._run = _PerSize()
        self._launch = _PerSize()
        self._last_end = 0.0

    def launched(self, size: int, seconds: float) -> None:
        """Launching a batch took so long."""
        self._launch.add(size, seconds)

    def ran(self, size: int, started: float, ended: float) -> None:
        """A batch was launched and ended at these times."""
        # Behind another one it began when that had ended.
        self._run.add(size, max(0.0, ended - max(started, self._last_end)))
        self._last_end = ended

    def due(self, size: int, started: float, waiting: int, now: float) -> bool:
        """Whether it is time to launch a batch of ``waiting`` behind ``size`` in the engine.

        ``started`` is when the first of that was launched.

        Too early costs a part of what the next batch could hold, too late leaves the engine idle: what is not
        known counts as nothing, and then it is time.
        """
        end = max(started, self._last_end) + self._run.seconds(size)
        return end - now <= 2 * self._launch.seconds(waiting) + _SPARE_SECONDS
