"""Several tasks as one: until something else happens, until one fails; deadlines, and polling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tessera.errors import DeadlineExceeded

T = TypeVar("T")

_SPIN_SECONDS: Final = 3e-4


class Left(Exception):
    """What work was done for has left, or the work itself was cancelled."""


async def run_until(left: Awaitable[object], work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` until ``left`` is done; the result of ``work``.

    Raises ``Left`` when ``left`` is done first, and what ``work`` raises. Work that is not done by then, or
    by a cancellation from outside, is cancelled, and has ended when this returns.
    """
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left)
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():
            raise Left
        return task.result()
    finally:
        if not leaving.cancel() and not leaving.cancelled():
            # An error counts as leaving; asyncio complains of one that is not retrieved.
            leaving.exception()
        await _end([task])


class Departure:
    """Says that whoever work is done for has gone, which cancels the work; owned by one event loop.

    Beside ``run_until`` for what is told and not waited for: it takes no task. One piece of work at a time.
    """

    __slots__ = ("_gone", "_task")

    def __init__(self) -> None:
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    def leave(self) -> None:
        """Cancel the work that is under way, and any that would begin later."""
        if not self._gone:
            self._gone = True
            if self._task is not None:
                self._task.cancel()

    def gone(self) -> bool:
        return self._gone

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; raises ``Left`` once it has ended because of ``leave``."""
        if self.gone():
            work.close()
            raise Left
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await work
        except asyncio.CancelledError:
            # As ``asyncio.timeout``: a cancellation from outside that came as well goes on.
            if self.gone() and task.uncancel() <= before:
                raise Left from None
            raise
        finally:
            self._task = None


async def run_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at the same time; their results in order.

    Raises the first error, as it is. The others are cancelled then, as all are by a cancellation from
    outside, and have ended when this returns. (``asyncio.TaskGroup`` wraps errors in a group; taking one out
    replaces its context. Before Python 3.13 it also loses a cancellation that comes together with an error.)
    """
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what is not done and wait until all has ended; errors stay in the tasks."""
    for task in tasks:
        task.cancel()
    if not all(task.done() for task in tasks):
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.exception()


class Promise(asyncio.Future[T]):
    """A future whose maker learns of its cancellation at once, and not in the loop's next round."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.when_cancelled: Callable[[], None] | None = None

    def cancel(self, msg: object = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.when_cancelled is not None:
            self.when_cancelled()
        return cancelled


class Poll:
    """Pauses between two looks at something that is under way.

    The event loop's clock wakes a sleeper a millisecond late at worst, which is longer than most
    hand-offs: at first it only gives other tasks their turn, and sleeps once that has lasted a while.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    async def pause(self) -> None:
        await asyncio.sleep(0 if self.elapsed < _SPIN_SECONDS else 1e-3)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock. Other processes are told what is left, never the point."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds; raises ``DeadlineExceeded`` when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request was not answered in time")
        return left
