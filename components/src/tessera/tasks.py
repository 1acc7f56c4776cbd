"""Tasks together: until something happens, until one fails, one for all; endless loops; deadlines, polls."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tessera.errors import DeadlineExceeded, RequestCancelled, TesseraError

T = TypeVar("T")

log = logging.getLogger(__name__)

_SPIN_SECONDS: Final = 3e-4
_GONE: Final = "the client went away"


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


@dataclass(slots=True, eq=False)
class Departure:
    """Says that the client that work is done for has gone, which cancels the work; owned by one event loop.

    Beside ``run_until`` for what is told and not waited for: it takes no task. One piece of work at a time.
    """

    _gone: bool = False
    _task: asyncio.Task[Any] | None = None

    def leave(self) -> None:
        """Cancel the work that is under way, and any that would begin later."""
        if not self._gone:
            self._gone = True
            if self._task is not None:
                self._task.cancel()

    def gone(self) -> bool:
        return self._gone

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; raises ``RequestCancelled`` once it has ended because of ``leave``."""
        if self.gone():
            work.close()
            raise RequestCancelled(_GONE)
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await work
        except asyncio.CancelledError:
            # As ``asyncio.timeout``: a cancellation from outside that came as well goes on.
            if self.gone() and task.uncancel() <= before:
                raise RequestCancelled(_GONE) from None
            raise
        finally:
            self._task = None


@contextmanager
def own_cancellation() -> Iterator[None]:
    """Let a cancellation of the running task through; one of what it awaits becomes a ``TesseraError``.

    Who awaits a task that another one has cancelled gets the same error as one that is cancelled itself,
    and a server answers nothing to a call that it takes for cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TesseraError("a part of the work was cancelled") from error


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


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Runs one task for each key at a time.

    The task belongs to no caller: the first one may be cancelled without stranding those that joined, and one
    that joined may be cancelled without harming the rest. When the last one is gone the task is cancelled.
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    async def run(self, key: Hashable, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``compute`` for the key, of this call or of one under way; all raise its error."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(compute()))
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                # Forgotten now, not when the cancellation has come through: a caller that arrives in
                # between must start anew instead of joining a task that is about to die.
                self._forget(key, flight)
                flight.task.cancel()

    def _forget(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            # With every waiter gone nothing else retrieves the error, and asyncio would complain.
            flight.task.exception()


class Keeper:
    """Runs the endless loops of a process: none ends by an error; owned by one event loop.

    A round that raises is logged with its traceback and counted, and the loop goes on after a pause, which
    doubles from ``first_pause`` to ``longest_pause`` seconds while rounds keep failing. ``failures`` are
    counts by loop. ``on_change`` is called whenever ``trouble`` has become another sentence.
    """

    MOST_FAILURES: Final = 5
    """Rounds of one loop that fail one after the other before the process counts as unhealthy."""

    def __init__(self, *, first_pause: float = 0.5, longest_pause: float = 5.0) -> None:
        self.first_pause, self.longest_pause = first_pause, longest_pause
        self.failures: Counter[str] = Counter()
        self.on_change: Callable[[str | None], object] = lambda trouble: None
        self._failing: dict[asyncio.Task[None], str] = {}

    @property
    def trouble(self) -> str | None:
        """A sentence that names a loop which keeps failing; None while there is none."""
        return next(iter(self._failing.values()), None)

    def start(
        self, name: str, round_: Callable[[], Awaitable[object]], *, every: float = 0.0, of: str = ""
    ) -> asyncio.Task[None]:
        """Run rounds with ``every`` seconds between them until the task is cancelled.

        ``name`` is one of few, for metrics; ``of`` adds to it in the log what the loop belongs to.
        """
        title = f"{name} of {of}" if of else name
        task = asyncio.create_task(self._run(name, title, round_, every), name=title)
        task.add_done_callback(self._recovered)
        return task

    async def _run(
        self, name: str, title: str, round_: Callable[[], Awaitable[object]], every: float
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        in_a_row = 0
        while True:
            try:
                await round_()
            except (Exception, asyncio.CancelledError) as error:
                # A round may await what somebody else cancels, which is no word to this loop.
                if isinstance(error, asyncio.CancelledError) and task.cancelling():
                    raise
                in_a_row += 1
                self._failed(task, name, title, in_a_row, error)
                await asyncio.sleep(min(self.first_pause * 2 ** min(in_a_row - 1, 16), self.longest_pause))
            else:
                in_a_row = 0
                self._recovered(task)
                await asyncio.sleep(every)

    def _failed(
        self, task: asyncio.Task[None], name: str, title: str, in_a_row: int, error: BaseException
    ) -> None:
        log.error("the loop %r failed and will be tried again", title, exc_info=error)
        self.failures[name] += 1
        if in_a_row == self.MOST_FAILURES:
            before = self.trouble
            self._failing[task] = (
                f"the loop {title!r} has failed {in_a_row} times in a row, last with {type(error).__name__}"
            )
            log.critical("this process should be replaced: %s", self._failing[task])
            self._changed(before)

    def _recovered(self, task: asyncio.Task[None]) -> None:
        before = self.trouble
        if self._failing.pop(task, None) is not None:
            self._changed(before)

    def _changed(self, before: str | None) -> None:
        if self.trouble != before:
            self.on_change(self.trouble)


KEEPER: Final = Keeper()
"""The one of this process."""


class Promise(asyncio.Future[T]):
    """A future whose maker learns of its cancellation at once, and not in the loop's next round."""

    when_cancelled: Callable[[], None] | None = None

    def cancel(self, msg: object = None) -> bool:
        cancelled = super().cancel(msg)
        call, self.when_cancelled = self.when_cancelled, None
        if cancelled and call is not None:
            call()
        return cancelled

    def settle(self, outcome: T | TesseraError) -> None:
        """Set the result, or the error."""
        # Its maker and it would keep each other until the collector comes.
        self.when_cancelled = None
        if isinstance(outcome, TesseraError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


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
    """A point on this process's monotonic clock. Other processes are told what is left, never the point.

    ``seconds`` is the time that the request has in all, for errors.
    """

    at: float
    seconds: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds, seconds)

    def exceeded(self, param: str | None = None) -> DeadlineExceeded:
        """Return the error that the time is over."""
        return DeadlineExceeded(f"the request took longer than {round(self.seconds, 3):g} s", param=param)

    def left(self) -> float:
        """Seconds; raises ``DeadlineExceeded`` when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise self.exceeded()
        return left

    @asynccontextmanager
    async def bound(self) -> AsyncIterator[None]:
        """Raise ``DeadlineExceeded`` where the time is over before the context ends."""
        left = self.left()
        try:
            async with asyncio.timeout(None if left == math.inf else left):
                yield
        except TimeoutError:
            raise self.exceeded() from None
