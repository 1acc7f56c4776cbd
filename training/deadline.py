"""When a run has to end: its minutes are over, or somebody told it to."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from types import FrameType


class Deadline:
    """``minutes`` count from the start of the process, imports included; ``None`` sets no limit."""

    def __init__(self, minutes: float | None) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes - process_age()
        self._owner = os.getpid()
        self.told = False
        """A signal came: end as soon as everything is written."""

    @property
    def left(self) -> float:
        """Seconds, below 0 once the time is over."""
        return self._end - time.monotonic()

    def heed_signals(self) -> None:
        """Let SIGTERM and SIGINT ask for the end, in this process only; a second one ends it at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The data loader's processes inherit the handler, and are ended by signals like any other process.
        if self.told or os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.told = True


def process_age() -> float:
    """Seconds since this process was started, by Linux's own account (proc(5), ``starttime``)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
