"""Runs engines on an event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

import uvloop

from tessera.errors import Unavailable
from tessera.local.content import Content
from tessera.local.engines import Engines
from tessera.local.groups import IN_FLIGHT, Size
from tessera.local.plan import EnginePlan
from tessera.local.vectors import Vectors
from tessera.local.wanted import Wanted

T = TypeVar("T")

_CLOSED: Final = "this Embedder is closed"


class BackgroundEngines:
    """The engines of a plan, for all threads of a process; what these have under way together is bounded."""

    def __init__(self, plan: EnginePlan) -> None:
        """Start the engines. Raises ``TesseraError`` where one cannot be started."""
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        # The processes below end with the thread that started them.
        self._thread = threading.Thread(target=self._run, name="tessera", daemon=True)
        # Re-entrant: the garbage collector may call ``abandon`` at any time.
        self._room = threading.Condition(threading.RLock())
        self._calls = self._weight = self._nbytes = 0
        self._futures: set[Future[Any]] = set()
        self._closed = False
        self._engines: Engines | None = None
        self._thread.start()
        try:
            self._engines = self.wait(self._begin(Engines.start(plan)))
        except BaseException:
            self.close()
            raise
        self.model = self._engines.model
        self._most = IN_FLIGHT[0] * self._engines.count, IN_FLIGHT[1]

    def check(self) -> None:
        """Raise ``Unavailable`` after ``close``, and in a process that was forked from this one."""
        if os.getpid() != self._pid:
            raise Unavailable("a forked process cannot use its parent's Embedder: make one in each process")
        if self._closed:
            raise Unavailable(_CLOSED)

    def submit(self, contents: Sequence[Content], wanted: Wanted, size: Size) -> Future[Vectors]:
        """Begin to make what is wanted of contents of that size, once there is room; larger ones go alone.

        Raises as ``check``.
        """
        self.check()
        weight, nbytes = size
        with self._room:
            self._room.wait_for(
                lambda: (
                    self._closed
                    or not self._calls
                    or (self._weight + weight <= self._most[0] and self._nbytes + nbytes <= self._most[1])
                )
            )
            assert self._engines is not None
            future = self._begin(self._engines.embed(contents, wanted))
            self._count(1, weight, nbytes)
        future.add_done_callback(lambda _: self._count(-1, -weight, -nbytes))
        return future

    def wait(self, future: Future[T]) -> T:
        """Return what a call gives or raise what it raises; a caller that is interrupted cancels it."""
        try:
            return future.result()
        except CancelledError:
            raise Unavailable(_CLOSED) from None
        finally:
            future.cancel()

    def close(self) -> None:
        """End the processes, and calls under way with ``Unavailable``; does nothing the second time."""
        self.abandon()
        if os.getpid() == self._pid:
            self._thread.join()

    def abandon(self) -> None:
        """Begin to close, and wait for nothing."""
        if os.getpid() != self._pid:
            return
        with self._room:
            if not self._closed:
                self._closed = True
                self._room.notify_all()
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._room:
            if self._closed:
                work.close()
                raise Unavailable(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _count(self, calls: int, weight: int, nbytes: int) -> None:
        with self._room:
            self._calls += calls
            self._weight += weight
            self._nbytes += nbytes
            self._room.notify_all()

    async def _end(self) -> None:
        for future in list(self._futures):
            future.cancel()
        try:
            if self._engines is not None:
                await self._engines.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        finally:
            self._loop.stop()
