"""Where calls wait for room: in the order in which they came, until their deadlines, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from tessera.errors import DeadlineExceeded, Overloaded, RateLimited
from tessera.tasks import Deadline

T = TypeVar("T")

MOST_WAITING: Final = 1024
"""Calls that wait at a time, of one frontend."""
MOST_BYTES: Final = 512 << 20
"""Of their tensors together."""
FULL: Final = "Exceeds maximum queue size"
"""What NVIDIA's own clients look for in the message of an UNAVAILABLE, to send the request again."""

# Room may become free in another frontend: nobody tells.
_LOOK_SECONDS: Final = 0.002


class Line:
    """Owned by one event loop. Those that wait for one room do not hold up those of another."""

    def __init__(self, *, most: int = MOST_WAITING, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.waiting = 0
        self.nbytes = 0
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def wait(self, room: Hashable, take: Callable[[], T], *, nbytes: int, deadline: Deadline) -> T:
        """What ``take`` gives, once it does not raise ``Overloaded``.

        Raises ``Overloaded`` where too many calls, or bytes of them, wait already, ``DeadlineExceeded``, and
        what else ``take`` raises, ``RateLimited`` included: waiting does not help a key against its own rate
        any sooner than the client's next attempt.
        """
        turn = self._turns.get(room)
        if turn is None:
            turn = self._turns[room] = asyncio.Lock()
        if not turn.locked():
            try:
                return take()
            except RateLimited:
                raise
            except Overloaded:
                pass
        if self.waiting >= self._most or (self.waiting and self.nbytes + nbytes > self._most_bytes):
            raise Overloaded(
                f"{FULL}: {self.waiting} requests with {self.nbytes} bytes wait already", retry_after=1.0
            )
        self.waiting += 1
        self.nbytes += nbytes
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
            self.waiting -= 1
            self.nbytes -= nbytes
