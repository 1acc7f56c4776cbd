"""A clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Called for the time, in seconds, like ``time.monotonic``; ``now`` is what it says."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now
