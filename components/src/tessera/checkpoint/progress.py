"""How far a download, or the reading of weights, has come: in lines of the log, or in a bar."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final

# Lines come after a tenth of all bytes, and not more often than this; after a minute in any case.
_SHARE: Final = 0.1
_SECONDS: Final = 5.0
_MOST_SECONDS: Final = 60.0


class Progress:
    """``total`` bytes, of which ``done`` were there before. Thread-safe.

    What is over within five seconds writes nothing, and what ends within ten minutes at most ten lines.
    """

    def __init__(
        self, log: logging.Logger, what: str, total: int, *, done: int = 0, bar: bool = False
    ) -> None:
        self._log, self._what, self._total = log, what, total
        self._done = self._before = self._said = done
        self._began = self._said_at = time.monotonic()
        self._lock = threading.Lock()
        self._bar = _bar(what, total, done) if bar else None

    def add(self, nbytes: int) -> None:
        """Count bytes; fewer than none where some have to be fetched again."""
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
                return
            now = time.monotonic()
            quiet = now - self._said_at
            moved = self._done - self._said >= _SHARE * self._total
            if quiet >= _MOST_SECONDS or (moved and quiet >= _SECONDS):
                self._said, self._said_at = self._done, now
                self._log.info("%s", self._line(now))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, now: float) -> str:
        rate = (self._done - self._before) / (now - self._began)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate > 0 else ""
        return f"{self._what}: {size(self._done)} of {size(self._total)}, {size(int(rate))}/s{left}"


def size(nbytes: int) -> str:
    """A number of bytes for people, as ``3.4 GB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _bar(what: str, total: int, done: int) -> Any:
    # The library's own, for its variables (HF_HUB_DISABLE_PROGRESS_BARS). Only downloads have bars.
    from huggingface_hub.utils import tqdm

    return tqdm(  # type: ignore[no-untyped-call]
        desc=what, total=total, initial=done, unit="B", unit_scale=True, dynamic_ncols=True
    )
