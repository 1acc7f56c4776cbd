"""Batches work across requests for one engine.

The event loop owns the queue; the engine thread takes whole batches from a ``Slot`` and never waits for
the loop. Replies go back in one hop for each batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tessera import tracing
from tessera.admission import Budget
from tessera.batching import traces
from tessera.batching.entry import Entry, Outcome, P, R, requests_of
from tessera.batching.pace import Pace
from tessera.batching.queue import FairQueue
from tessera.batching.slot import Cost, Slot
from tessera.errors import EngineDead, EngineFailed, Overloaded, TesseraError, Unavailable
from tessera.logs import current_line

log = logging.getLogger(__name__)

R_co = TypeVar("R_co", covariant=True)

# How long the engine thread looks for a next batch before it looks at the launched ones again.
_PEEK_SECONDS = 0.0002


class Running(Protocol[R_co]):
    """A launched batch; ``result`` gives one value for each entry, in order."""

    def done(self) -> bool: ...

    def result(self) -> Sequence[R_co]: ...


Launch = Callable[[Sequence[P]], Running[R]]


@dataclass(frozen=True, slots=True)
class BatchStats:
    """One batch that ran: entries, their summed size, milliseconds in the engine."""

    entries: int
    size: int
    run_ms: float


@dataclass(slots=True)
class _InFlight(Generic[P, R]):
    entries: list[Entry[P, R]]
    running: Running[R]
    started: float


class Batcher(Generic[P, R]):
    """Queues payloads by size and runs them in batches on its own thread.

    ``budget`` bounds what a batch costs, ``max_queued`` the size that may wait and ``max_wait`` the seconds
    that it would take to work it off; ``depth`` batches may be launched and unfinished at a time. Called on
    the event loop: ``observe`` after each batch, ``dropped`` for each entry that was cancelled before it
    ran, ``died`` when the engine has raised ``EngineDead``, after which nothing is run any more. ``describe``
    gives a batch's attributes in traces, and is called only for batches that leave one.
    """

    def __init__(
        self,
        name: str,
        launch: Launch[P, R],
        *,
        cost: Cost,
        budget: int,
        max_queued: int,
        depth: int,
        max_wait: float = math.inf,
        observe: Callable[[BatchStats], None] = lambda _: None,
        dropped: Callable[[], None] = lambda: None,
        died: Callable[[EngineDead], None] = lambda _: None,
        describe: traces.Describe[P] = lambda _: {},
    ) -> None:
        self.name = name
        self._launch = launch
        self._depth = depth
        self._cost = cost
        self._batch = budget
        self._max_queued = max_queued
        self._max_wait = max_wait
        self._observe = observe
        self._dropped = dropped
        self._died = died
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[P, R] = FairQueue()
        self._waiting = Budget(lambda: self.limit)
        self._empty = asyncio.Event()
        self._empty.set()
        self._pace = Pace()
        self._slot: Slot[P, R] = Slot(cost, budget)
        self._closed = False
        self._dead: EngineDead | None = None
        self._running_since = math.inf
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Size of what has been submitted and is not in the engine yet."""
        return self._waiting.used

    @property
    def limit(self) -> int:
        """Size that may wait, at the pace of now."""
        if math.isinf(self._max_wait) or not self._pace.rate:
            return self._max_queued
        # However slow it is, the next batch may always be full.
        return min(self._max_queued, max(self._batch, int(self._pace.rate * self._max_wait)))

    @property
    def capacity(self) -> int:
        """Size that may be here at a time: waiting, or in the engine."""
        return self.limit + self._depth * self._batch

    @property
    def running_seconds(self) -> float:
        """How long the oldest batch has been in the engine; 0 when none is."""
        return max(0.0, time.perf_counter() - self._running_since)

    def check(self, size: int, client: str = "") -> None:
        """Raise what ``submit`` would raise."""
        if self._dead is not None:
            raise EngineDead(self._dead.message)
        if self._closed:
            raise Unavailable(f"the {self.name} engine is closing")
        if not self._waiting.admits(client, size):
            raise Overloaded(
                f"the {self.name} queue is full ({self.queued} of {self.limit})",
                retry_after=self.seconds_to_drain(),
            )

    def submit(
        self,
        payload: P,
        size: int,
        *,
        client: str = "",
        priority: int = 0,
        admitted: bool = False,
        abandoned: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[Outcome[R]]:
        """Queue one payload. Cancelling the future drops it, if the engine has not begun it.

        ``client`` is whom it is for: clients share the queue and the engine by size. Of what waits, smaller
        ``priority`` goes first. ``admitted`` says that the caller has asked before (``check``) and must not
        be refused now. ``abandoned`` is called after a cancellation, once the engine is done with the
        payload. Raises ``Overloaded`` when the queue is full, ``Unavailable`` after ``close``, ``EngineDead``
        when there is no engine any more.
        """
        if not admitted or self._closed or self._dead is not None:
            self.check(size, client)
        line = current_line()
        entry: Entry[P, R] = Entry(
            payload,
            size,
            client,
            priority,
            self._loop.create_future(),
            time.perf_counter(),
            abandoned,
            line.request_id if line is not None else "",
        )
        entry.asked = tracing.here()
        entry.future.add_done_callback(lambda future: self._drop(entry) if future.cancelled() else None)
        self._waiting.take(client, size)
        self._empty.clear()
        if self._queue or not self._slot.offer(entry):
            self._queue.push(entry)
            if self._queue.head() is entry:
                self._feed()
        else:
            entry.left_queue = True
        return entry.future

    async def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._closed = True
        await self._empty.wait()
        self._slot.close()
        await asyncio.to_thread(self._thread.join)

    def seconds_to_drain(self, size: int | None = None) -> float:
        """An estimate for so much, or for what is queued now."""
        return self._pace.seconds(self.queued if size is None else size)

    def _drop(self, entry: Entry[P, R]) -> None:
        entry.dropped = True
        if not entry.left_queue:
            self._queue.discard(entry)
            self._give_up([entry])

    def _give_up(self, entries: list[Entry[P, R]]) -> None:
        """Cancelled entries that never ran."""
        for entry in entries:
            self._waiting.give(entry.client, entry.size)
            entry.abandoned()
            self._dropped()
        self._settle()

    def _feed(self) -> None:
        while self._queue and self._slot.offer(self._queue.head()):
            self._queue.pop()
        self._settle()

    def _settle(self) -> None:
        if not self._waiting.used:
            self._empty.set()

    # What follows runs on the engine thread.

    def _run(self) -> None:
        launched: deque[_InFlight[P, R]] = deque()
        while True:
            self._running_since = launched[0].started if launched else math.inf
            full = len(launched) >= self._depth
            taken = [] if full else self._slot.take(_PEEK_SECONDS if launched else None)
            if taken is None and not launched:
                return
            if taken:
                alive, dead = _part(taken)
                self._loop.call_soon_threadsafe(self._taken, alive, dead, time.perf_counter())
                if alive:
                    self._start(alive, launched)
            if launched and (full or launched[0].running.done() or taken is None):
                self._finish(launched.popleft())

    def _start(self, entries: list[Entry[P, R]], launched: deque[_InFlight[P, R]]) -> None:
        started = time.perf_counter()
        if not launched:
            self._running_since = started
        try:
            if self._dead is not None:
                raise EngineDead(self._dead.message)
            running = self._launch([entry.payload for entry in entries])
        except Exception as error:
            self._failed(entries, error, started)
            return
        launched.append(_InFlight(entries, running, started))

    def _finish(self, batch: _InFlight[P, R]) -> None:
        try:
            values = batch.running.result()
            if len(values) != len(batch.entries):
                raise EngineFailed(
                    f"the {self.name} engine gave {len(values)} results for {len(batch.entries)} entries"
                )
        except Exception as error:
            self._failed(batch.entries, error, batch.started)
            return
        self._loop.call_soon_threadsafe(
            self._deliver, batch.entries, values, batch.started, time.perf_counter()
        )

    def _failed(self, entries: list[Entry[P, R]], error: Exception, started: float) -> None:
        if tracing.recording():
            ended = time.perf_counter()
            self._loop.call_soon_threadsafe(
                traces.ran, self.name, entries, started, ended, self._describe, error
            )
        if isinstance(error, EngineDead):
            if self._dead is None:
                self._dead = error
                log.critical("%s engine: %s", self.name, error)
                self._loop.call_soon_threadsafe(self._died, error)
            self._loop.call_soon_threadsafe(self._fail, entries, error)
            return
        if len(entries) == 1:
            failure = (
                error
                if isinstance(error, TesseraError)
                else EngineFailed(f"the {self.name} engine failed: {error}")
            )
            if failure is not error:
                log.error(
                    "%s engine: %s: %s", self.name, type(error).__name__, error, extra=requests_of(entries)
                )
            self._loop.call_soon_threadsafe(self._fail, entries, failure)
            return
        # One entry must not fail the batch it rode in: halve until it stands alone.
        log.warning(
            "%s engine: a batch of %d failed (%s); trying halves",
            *(self.name, len(entries), error),
            extra=requests_of(entries),
        )
        middle = len(entries) // 2
        for half in (entries[:middle], entries[middle:]):
            alive, dead = _part(half)
            if dead:
                self._loop.call_soon_threadsafe(self._forsake, dead)
            launched: deque[_InFlight[P, R]] = deque()
            if alive:
                self._start(alive, launched)
            if launched:
                self._finish(launched.popleft())

    # What follows runs on the event loop again.

    def _taken(self, alive: list[Entry[P, R]], dead: list[Entry[P, R]], at: float) -> None:
        for entry in alive:
            self._waiting.give(entry.client, entry.size)
        self._give_up(dead)
        self._feed()
        traces.waited(self.name, alive, at)

    def _deliver(self, entries: list[Entry[P, R]], values: Sequence[R], started: float, ended: float) -> None:
        run_ms = (ended - started) * 1e3
        size = longest = 0
        for entry, value in zip(entries, values, strict=True):
            size += entry.size
            longest = max(longest, entry.size)
            if entry.future.cancelled():
                entry.abandoned()
            else:
                entry.future.set_result(Outcome(value, (started - entry.enqueued) * 1e3, run_ms))
        # Small batches are slow for their size, and say nothing of what the engine does under load.
        full = 2 * self._cost(len(entries), size, longest) >= self._batch
        self._pace.ran(size if full else 0, started, ended)
        self._observe(BatchStats(len(entries), size, run_ms))
        traces.ran(self.name, entries, started, ended, self._describe)

    def _fail(self, entries: list[Entry[P, R]], error: TesseraError) -> None:
        for entry in entries:
            if entry.future.cancelled():
                entry.abandoned()
            else:
                entry.future.set_exception(error)

    def _forsake(self, entries: list[Entry[P, R]]) -> None:
        """Cancelled entries of a batch that failed; they will not run again."""
        for entry in entries:
            entry.abandoned()
            self._dropped()


def _part(entries: list[Entry[P, R]]) -> tuple[list[Entry[P, R]], list[Entry[P, R]]]:
    # Each flag is read once: the event loop may set it at any moment, and an entry is either run or not.
    alive: list[Entry[P, R]] = []
    dead: list[Entry[P, R]] = []
    for entry in entries:
        (dead if entry.dropped else alive).append(entry)
    return alive, dead
