"""One HTTP exchange: its body under a limit and a clock, and a client that may hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from tessera.errors import PayloadTooLarge, RequestCancelled, RequestTimeout, UnsupportedMedia
from tessera.tasks import Left, run_until

T = TypeVar("T")


async def read_body(request: Request, *, limit: int, timeout: float) -> bytes:
    """The whole body; ``limit`` in bytes, ``timeout`` in seconds.

    The announced length is refused before a byte is read, and what really arrives is counted as well. A
    compressed body is refused: how large it would become is not known before it has.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise UnsupportedMedia("the body must be sent as it is, without a Content-Encoding")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError as error:
        raise RequestTimeout(f"the request body did not arrive within {timeout:.0f} s") from error
    except ClientDisconnect as error:
        raise RequestCancelled("the client went away while it was sending") from error
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {limit} bytes that a request may have")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; a client that goes away meanwhile cancels it (``RequestCancelled``).

    The body must have been read: what the connection sends next can then only be its end.
    """
    try:
        return await run_until(_disconnected(request), work)
    except Left:
        raise RequestCancelled("the client went away") from None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Turns:
    """Between two turns the loop looks at the network, however many requests have come at once.

    Reading one request or writing one answer takes a millisecond. When a hundred are ready together, whoever
    comes then, to be refused or to ask for ``/health``, would wait for all of them. Owned by one event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Within, nothing may be awaited; turns are taken in the order in which they were asked for."""
        await self._lock.acquire()
        try:
            yield
        finally:
            # In the loop's next round, not in this one.
            asyncio.get_running_loop().call_soon(self._lock.release)
