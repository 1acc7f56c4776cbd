"""Ranges of a fixed space, handed out first come first served."""

from __future__ import annotations

import asyncio
import re
from collections import deque

from tessera.errors import HandOffError, Overloaded


class Space:
    """Hands out ranges of ``blocks``, first come first served: small requests do not overtake a large one.

    It gives numbers, each range the first that fits, and knows nothing of memory. ``name`` is what errors
    call it. Not thread-safe; every call is made from one event loop.
    """

    def __init__(self, blocks: int, *, name: str) -> None:
        if blocks <= 0:
            raise ValueError(f"the {name} needs at least one block, not {blocks}")
        self.size = blocks
        self.used = 0
        self.waits = 0
        self._name = name
        # A byte for each block, which is 1 while it is taken. To search 65,536 of them takes 5 µs where the
        # taken ones lie together, 0.1 ms where they are scattered.
        self._taken = bytearray(blocks)
        self._waiters: deque[tuple[int, asyncio.Future[int]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The free ranges as (start, length), in order."""
        return tuple((gap.start(), len(gap[0])) for gap in re.finditer(rb"\0+", self._taken))

    def try_take(self, blocks: int) -> int | None:
        """The start of a free range, or None when there is none or others wait already."""
        if not 0 < blocks <= self.size:
            raise HandOffError(f"{blocks} blocks can never fit the {self._name}, which has {self.size}")
        return None if self._waiters else self._reserve(blocks)

    def _reserve(self, blocks: int) -> int | None:
        """Take the first gap that is long enough; None when there is none."""
        start = self._taken.find(bytes(blocks))
        if start < 0:
            return None
        self._taken[start : start + blocks] = b"\1" * blocks
        self.used += blocks
        return start

    async def take(self, blocks: int, *, timeout: float) -> int:
        """The start of a range of ``blocks``, waiting at most ``timeout`` seconds for it.

        Raises ``Overloaded`` when the time ran out and ``HandOffError`` for what can never fit.
        """
        start = self.try_take(blocks)
        if start is not None:
            return start
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        entry = (blocks, future)
        self._waiters.append(entry)
        self.waits += 1
        timer = loop.call_later(max(timeout, 0.0), self._expire, entry, timeout)
        try:
            return await future
        except asyncio.CancelledError:
            # The range may have been handed over in the same turn of the loop as the cancellation.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give(future.result(), blocks)
            else:
                self._leave(entry)
            raise
        finally:
            timer.cancel()

    async def share(self, blocks: int, *, timeout: float) -> SharedRange:
        """``take``, for a range that several holders share; raises like ``take``."""
        return SharedRange(self, await self.take(blocks, timeout=timeout), blocks)

    def give(self, start: int, blocks: int) -> None:
        """Return a range that was taken, as a whole."""
        end = start + blocks
        if blocks <= 0 or start < 0 or self._taken[start:end] != b"\1" * blocks:
            raise ValueError(f"blocks {start}..{end} are not taken")
        self._taken[start:end] = bytes(blocks)
        self.used -= blocks
        if self._waiters:
            self._serve()

    def fail_waiters(self, error: Exception) -> None:
        """End every wait, because the space goes away."""
        while self._waiters:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_exception(error)

    def _expire(self, entry: tuple[int, asyncio.Future[int]], timeout: float) -> None:
        blocks, future = entry
        if not future.done():
            future.set_exception(
                Overloaded(
                    f"the {self._name} is full: {self.used} of {self.size} blocks are taken and "
                    f"{blocks} did not come free within {timeout:.3g} s",
                    retry_after=1.0,
                )
            )
        self._leave(entry)

    def _leave(self, entry: tuple[int, asyncio.Future[int]]) -> None:
        if entry in self._waiters:
            self._waiters.remove(entry)
            # A smaller request behind this one may fit now.
            self._serve()

    def _serve(self) -> None:
        while self._waiters:
            blocks, future = self._waiters[0]
            if not future.done():
                start = self._reserve(blocks)
                if start is None:
                    return
                future.set_result(start)
            self._waiters.popleft()


class SharedRange:
    """A taken range that goes back when its last holder drops it; whoever makes it holds it first."""

    __slots__ = ("_holders", "_space", "blocks", "start")

    def __init__(self, space: Space, start: int, blocks: int) -> None:
        self._space = space
        self._holders = 1
        self.start = start
        self.blocks = blocks

    def hold(self) -> None:
        self._holders += 1

    def drop(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._space.give(self.start, self.blocks)
