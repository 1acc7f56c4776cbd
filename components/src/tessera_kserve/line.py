"""Where calls wait for room: a client's in the order in which they came, until their deadlines, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from tessera.budgets import Budget, Lines
from tessera.errors import DeadlineExceeded, Overloaded, RateLimited
from tessera.tasks import Deadline

T = TypeVar("T")

MOST_WAITING: Final = 1024
"""Calls that wait at a time, of one frontend."""
FULL: Final = "Exceeds maximum queue size"
"""What NVIDIA's own clients look for in the message of an UNAVAILABLE, to send the request again."""


class Line:
    """Owned by one event loop. Those that wait for one room do not hold up those of another.

    Nor do those of one client hold up another's: each looks for room by itself, which has shares, and has
    its share of the calls that may wait. Their bytes are counted where they are read.
    """

    def __init__(self, *, most: int = MOST_WAITING) -> None:
        self._calls = Budget(lambda: most, "the line", "requests that wait")
        self._lines = Lines()

    @property
    def waiting(self) -> int:
        """Return the calls that wait."""
        return self._calls.used

    async def wait(self, room: Hashable, take: Callable[[], T], *, client: str, deadline: Deadline) -> T:
        """What ``take`` gives, as ``Lines.wait`` does.

        Raises ``Overloaded`` where too many calls wait already, and ``DeadlineExceeded``.
        """
        key = (room, client)
        if self._lines.empty(key):
            try:
                return take()
            except RateLimited:
                raise
            except Overloaded:
                pass
        if not self._calls.admits(client, 1):
            raise self._calls.overloaded(client, 1, f"{FULL}: ")
        self._calls.take(client, 1)
        try:
            async with asyncio.timeout(deadline.left()):
                return await self._lines.wait(key, take)
        except TimeoutError:
            raise DeadlineExceeded("there was no room for the request in time") from None
        finally:
            self._calls.give(client, 1)
