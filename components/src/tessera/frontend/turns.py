"""Long pieces of work on the event loop, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
