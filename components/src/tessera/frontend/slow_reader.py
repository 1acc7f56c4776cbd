"""A client that does not read its answer."""

from __future__ import annotations

import asyncio
from typing import Final

# A client that reads less than this in the time that it has is not reading.
_PROGRESS_BYTES: Final = 16 << 10


class SlowReader:
    """Aborts a connection whose client has read nothing worth naming for so many seconds."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, seconds: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """From now on, while something waits for the client."""
        self.stop()
        self._timer = self._loop.call_later(
            self._seconds, self._look, self._transport.get_write_buffer_size()
        )

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, before: int) -> None:
        if self._transport.get_write_buffer_size() > before - _PROGRESS_BYTES:
            self._transport.abort()
        else:
            self.watch()
