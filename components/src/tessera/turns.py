"""Turns on slots, by client and by priority; threads that work in such turns; turns on an event loop."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeVar

from tessera.budgets import FairQueue

T = TypeVar("T")

_SHARE: Final = 4


@dataclass(slots=True, eq=False)
class Turn:
    """Waits for a slot on behalf of a client; ``size`` and ``priority`` are as in ``Queued``."""

    client: str
    size: int
    priority: int
    granted: asyncio.Future[None]
    in_queue: bool = False
    admitted: bool = False


class Turns:
    """Admits at most ``slots`` pieces of work at a time; the rest waits in a ``FairQueue``.

    A named client holds at most a quarter, rounded up, of the slots that the others leave free. One alone
    therefore leaves three quarters to those who come later, however long its work takes. With ``spare`` it
    holds all but so many of them, and one at least: for work that ends soon. Unnamed clients (``""``) are not
    told apart and share the whole. Owned by one event loop.
    """

    def __init__(self, slots: int, spare: int | None = None) -> None:
        self._slots = slots
        self._spare = spare
        self._held: Counter[str] = Counter()
        self._numbers = count()
        # By client, the heap of its turns behind the one that is in the queue.
        self._behind: dict[str, list[tuple[int, int, Turn]]] = {}
        self._offered: set[str] = set()
        self._queue: FairQueue[Turn] = FairQueue()

    @property
    def used(self) -> int:
        """Return the slots in use."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Return the turns that wait for a slot."""
        return len(self._offered) + sum(map(len, self._behind.values()))

    @asynccontextmanager
    async def slot(self, client: str = "", *, size: int = 1, priority: int = 0) -> AsyncIterator[None]:
        """Hold a slot for as long as the context lasts."""
        await self.take(client, size=size, priority=priority)
        try:
            yield
        finally:
            self.give(client)

    def place(self) -> int:
        """Return a place in the order of arrival."""
        return next(self._numbers)

    async def take(
        self, client: str = "", *, size: int = 1, priority: int = 0, place: int | None = None
    ) -> None:
        """Wait for a slot; a caller that is cancelled holds and waits for none afterwards.

        What needs several turns keeps its ``place`` among the client's others. If each turn were behind
        theirs, all would be done late when there are many, and none early.
        """
        turn = Turn(client, size, priority, asyncio.get_running_loop().create_future())
        order = self.place() if place is None else place
        # No two of one place wait at a time.
        heapq.heappush(self._behind.setdefault(client, []), (priority, order, turn))
        self._admit()
        try:
            if not turn.granted.done():
                await turn.granted
        except asyncio.CancelledError:
            if turn.admitted:
                self.give(client)
            else:
                self._withdraw(turn)
            raise

    def give(self, client: str = "") -> None:
        """Give a slot back."""
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._admit()

    def _admit(self) -> None:
        while self.used < self._slots:
            for client in [name for name in self._behind if self._may_hold_more(name)]:
                self._offer(client)
            if not self._queue:
                return
            turn = self._queue.pop()
            self._offered.discard(turn.client)
            self._held[turn.client] += 1
            turn.admitted = True
            if not turn.granted.done():
                turn.granted.set_result(None)

    def _may_hold_more(self, client: str) -> bool:
        if client in self._offered:
            return False
        held = self._held[client]
        free = self._slots - self.used + held
        share = -(-free // _SHARE) if self._spare is None else max(1, free - self._spare)
        return not client or held < share

    def _offer(self, client: str) -> None:
        """Put the client's next turn into the queue; a second one would wait there for its share."""
        turns = self._behind[client]
        self._queue.push(heapq.heappop(turns)[2])
        self._offered.add(client)
        if not turns:
            del self._behind[client]

    def _withdraw(self, turn: Turn) -> None:
        if turn.in_queue:
            self._queue.remove(turn)
            self._offered.discard(turn.client)
        else:
            turns = [entry for entry in self._behind.pop(turn.client) if entry[2] is not turn]
            if turns:
                heapq.heapify(turns)
                self._behind[turn.client] = turns
        self._admit()


ROUND_BYTES: Final = 4 << 10
"""What is parsed at a time of what comes from one connection, before others have their turn."""
ROUND_PARTS: Final = 64
"""The parts of it (fields, requests, pieces of bodies) after which others have theirs as well: one of a byte
takes as long as one of 64 KiB, and 256 KiB that come together may be 43,000 of those, 0.4 s of the loop."""


class Rounds:
    """Lets pieces of work go on, one in each round of the event loop, or in so many ``seconds``.

    What many have to do so keeps the others waiting no longer than what one has. Clients take turns, and the
    work of each goes on in order.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        # By client, the next one first.
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def wait(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None], client: str = "") -> None:
        """Call ``work`` in a later round."""
        if not self._waiting:
            self._go_on_later(loop)
        self._waiting.setdefault(client, deque()).append(work)

    async def turn(self, client: str = "") -> None:
        """Wait for a later round."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        self.wait(loop, grant, client)
        await granted

    def _go_on_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._seconds:
            loop.call_later(self._seconds, self._go_on, loop)
        else:
            loop.call_soon(self._go_on, loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        client = next(iter(self._waiting))
        works = self._waiting.pop(client)
        work = works.popleft()
        if works:
            self._waiting[client] = works
        if self._waiting:
            self._go_on_later(loop)
        work()


class Threads:
    """Runs functions on at most ``count`` threads of its own, by turns.

    A running thread cannot be cancelled: its slot is given back when the function has returned, while the
    caller is gone at once. Work that takes long is therefore run in pieces, one turn each. The threads are
    those of ``pool`` where it is given; ``spare`` is that of ``Turns``. Owned by one event loop.
    """

    def __init__(
        self, count: int, name: str, pool: ThreadPoolExecutor | None = None, *, spare: int | None = None
    ) -> None:
        self.turns = Turns(count, spare)
        self._pool = pool or ThreadPoolExecutor(count, thread_name_prefix=name)
        self._ended: deque[tuple[str, asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._telling = False

    async def run(
        self,
        work: Callable[[], T],
        client: str = "",
        *,
        size: int = 1,
        priority: int = 0,
        place: int | None = None,
    ) -> T:
        """Return the result of ``work``, which runs in the context of the caller; the rest as in ``take``."""
        await self.turns.take(client, size=size, priority=priority, place=place)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        try:
            # With the context of the request, for its spans and its lines of the log.
            self._pool.submit(copy_context().run, self._run, [work, client, loop, result])
        except BaseException:
            self.turns.give(client)
            raise
        try:
            return await result
        finally:
            # The future has the error, and the error its frames: 60 MB of a body waited for the collector.
            del work, result

    def _run(self, job: list[Any]) -> None:
        """Work on a thread; the loop is told once of all that has ended by then.

        A thread that tells it gives the interpreter's lock up, and beside a busy loop waits for a millisecond
        to have it back.
        """
        work, client, loop, result = job
        # What called this, down to the pool, is among an error's frames as well.
        job.clear()
        made, error = None, None
        try:
            made = work()
        except BaseException as raised:
            # A future takes every error but this one.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        self._ended.append((client, result, made, error))
        del error, work, result
        if not self._telling:
            self._telling = True
            loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        # Before it looks: who comes now tells once more.
        self._telling = False
        while self._ended:
            client, result, made, error = self._ended.popleft()
            self.turns.give(client)
            if result.done():
                # The caller has gone.
                continue
            if error is None:
                result.set_result(made)
            else:
                result.set_exception(error)

    def close(self) -> None:
        """Let the threads end behind the work that they are at."""
        self._pool.shutdown(wait=False)
