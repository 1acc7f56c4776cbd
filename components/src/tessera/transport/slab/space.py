"""A fixed space that callers wait for in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque

from tessera.errors import HandOffError, Overloaded
from tessera.transport.slab.allocator import RangeAllocator


class Space:
    """Ranges of ``units``, first come first served: a large request is not overtaken by small ones.

    ``name`` is what errors call it. Not thread-safe; every call is made from one event loop.
    """

    def __init__(self, units: int, *, name: str) -> None:
        self._ranges = RangeAllocator(units)
        self._name = name
        self._waiters: deque[tuple[int, asyncio.Future[int]]] = deque()
        self.waits = 0

    @property
    def size(self) -> int:
        return self._ranges.size

    @property
    def used(self) -> int:
        return self._ranges.used

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def try_take(self, units: int) -> int | None:
        """The start of a free range, or None when there is none or others wait already."""
        if units > self.size:
            raise HandOffError(f"{units} units can never fit the {self._name}, which has {self.size}")
        return None if self._waiters else self._ranges.take(units)

    async def take(self, units: int, *, timeout: float) -> int:
        """The start of a range of ``units``, waiting at most ``timeout`` seconds for it.

        Raises ``Overloaded`` when the time ran out and ``HandOffError`` for what can never fit.
        """
        start = self.try_take(units)
        if start is not None:
            return start
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        entry = (units, future)
        self._waiters.append(entry)
        self.waits += 1
        timer = loop.call_later(max(timeout, 0.0), self._expire, entry, timeout)
        try:
            return await future
        except asyncio.CancelledError:
            # The range may have been handed over in the same turn of the loop as the cancellation.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give(future.result(), units)
            else:
                self._leave(entry)
            raise
        finally:
            timer.cancel()

    async def borrow(self, units: int, *, timeout: float) -> Loan:
        """``take``, for a range that several holders share."""
        return Loan(self, await self.take(units, timeout=timeout), units)

    def give(self, start: int, units: int) -> None:
        self._ranges.give(start, units)
        self._serve()

    def fail_waiters(self, error: Exception) -> None:
        """End every wait, because the space goes away."""
        while self._waiters:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_exception(error)

    def _expire(self, entry: tuple[int, asyncio.Future[int]], timeout: float) -> None:
        units, future = entry
        if not future.done():
            future.set_exception(
                Overloaded(
                    f"the {self._name} is full: {self.used} of {self.size} units are taken and "
                    f"{units} did not come free within {timeout:.3g} s",
                    retry_after=1.0,
                )
            )
        self._leave(entry)

    def _leave(self, entry: tuple[int, asyncio.Future[int]]) -> None:
        if entry in self._waiters:
            self._waiters.remove(entry)
            # Whoever stood behind a request that was too large may fit now.
            self._serve()

    def _serve(self) -> None:
        while self._waiters:
            units, future = self._waiters[0]
            if not future.done():
                start = self._ranges.take(units)
                if start is None:
                    return
                future.set_result(start)
            self._waiters.popleft()


class Loan:
    """A taken range that goes back when its last holder drops it; whoever makes the loan holds it first."""

    __slots__ = ("_holders", "_space", "start", "units")

    def __init__(self, space: Space, start: int, units: int) -> None:
        self._space = space
        self._holders = 1
        self.start = start
        self.units = units

    def hold(self) -> None:
        self._holders += 1

    def drop(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._space.give(self.start, self.units)
