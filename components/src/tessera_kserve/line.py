"""Where calls wait for room: a client's in the order in which they came, until their deadlines, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from tessera.budgets import Budget
from tessera.errors import DeadlineExceeded, Overloaded, RateLimited
from tessera.tasks import Deadline

T = TypeVar("T")

MOST_WAITING: Final = 1024
"""Calls that wait at a time, of one frontend."""
FULL: Final = "Exceeds maximum queue size"
"""What NVIDIA's own clients look for in the message of an UNAVAILABLE, to send the request again."""

# Room may become free in another frontend: nobody tells.
_LOOK_SECONDS: Final = 0.002


class Line:
    """Owned by one event loop. Those that wait for one room do not hold up those of another.

    Nor do those of one client hold up another's: each looks for room by itself, which has shares, and has
    its share of the calls that may wait. Their bytes are counted where they are read.
    """

    def __init__(self, *, most: int = MOST_WAITING) -> None:
        self._calls = Budget(lambda: most, "the line", "requests that wait")
        self._turns: WeakValueDictionary[tuple[Hashable, str], asyncio.Lock] = WeakValueDictionary()

    @property
    def waiting(self) -> int:
        """Return the calls that wait."""
        return self._calls.used

    async def wait(self, room: Hashable, take: Callable[[], T], *, client: str, deadline: Deadline) -> T:
        """What ``take`` gives, once it does not raise ``Overloaded``.

        Raises ``Overloaded`` where too many calls wait already, ``DeadlineExceeded``, and what else ``take``
        raises, ``RateLimited`` included: waiting does not help a key against its own rate any sooner than the
        client's next attempt.
        """
        turn = self._turns.get((room, client))
        if turn is None:
            turn = self._turns[room, client] = asyncio.Lock()
        if not turn.locked():
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
                async with turn:
                    while True:
                        try:
                            return take()
                        except RateLimited:
                            raise
                        except Overloaded:
                            await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded("there was no room for the request in time") from None
        finally:
            self._calls.give(client, 1)
