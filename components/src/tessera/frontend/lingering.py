"""Closing a connection whose client may still be sending."""

from __future__ import annotations

import asyncio
from typing import Final

_SECONDS: Final = 1.0


class Lingering(asyncio.Transport):
    """A connection's transport; what is written last reaches a client that is still sending.

    Closing at once would reset the connection under it, and the answer would be lost. Whoever hands this
    out throws away what still arrives.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.write_eof()
        self._loop.call_later(_SECONDS, self._transport.close)
