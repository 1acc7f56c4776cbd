"""A raw HTTP server on loopback whose answers are written byte by byte, and a policy that lets it in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tessera.frontend.media.policy import MediaPolicy, refusal

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
"""(request head, connection); the connection is closed afterwards."""


class LoopbackPolicy(MediaPolicy):
    """Allows 127.0.0.1, where the hostile server is, and nothing else that is private.

    A busy machine may take longer than the usual 10 seconds.
    """

    timeout: float = 100.0

    def address_refusal(self, address: str) -> str | None:
        return None if address == "127.0.0.1" else refusal(address)


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    """Serve on a free port, which is yielded."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await handler(head.decode("latin-1"), writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


def response(body: bytes = b"", *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
