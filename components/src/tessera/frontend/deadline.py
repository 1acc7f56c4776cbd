"""The time a request has left; it only ever shrinks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tessera.errors import DeadlineExceeded


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
