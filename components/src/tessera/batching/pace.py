"""How fast an engine works off what it is given."""

from __future__ import annotations

_WEIGHT = 0.2


class Pace:
    """Size per second of engine time, as a moving average over batches."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._last_end = 0.0

    @property
    def rate(self) -> float:
        """0 until a batch has been counted."""
        return self._rate

    def ran(self, size: int, started: float, ended: float) -> None:
        """A batch ran between two points of one clock, in seconds; batches may overlap.

        A size of 0 is not counted.
        """
        # Two batches are on their way at a time: the second one's time begins when the first has ended.
        rate = size / max(ended - max(started, self._last_end), 1e-6)
        self._last_end = ended
        if not size:
            return
        self._rate = (1 - _WEIGHT) * self._rate + _WEIGHT * rate if self._rate else rate

    def seconds(self, size: int) -> float:
        """An estimate for so much work, at least 0.1; 1 when nothing is known yet."""
        return max(0.1, size / self._rate) if self._rate else 1.0
