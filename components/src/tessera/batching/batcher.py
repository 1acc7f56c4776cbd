"""Batches work across requests for one engine.

The event loop owns the queue; the ``EngineThread`` takes whole batches from a ``Slot`` and never waits for
the loop. Replies go back in one hop for each batch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from tessera import tracing
from tessera.batching.engine_thread import EngineThread, Launch
from tessera.batching.open_batch import Cost, Slot
from tessera.batching.queue import Entry, FairQueue, Outcome, P, R
from tessera.errors import EngineDead, Overloaded, TesseraError, Unavailable
from tessera.fair_share import Budget
from tessera.logs import current_line

_WEIGHT = 0.2


class Pace:
    """Size per second of engine time, as a moving average over batches."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._last_end = 0.0

    @property
    def rate(self) -> float:
        """0 until a batch has been counted."""
        return self._rate

    def ran(self, size: int, started: float, ended: float) -> None:
        """A batch ran between two points of one clock, in seconds; batches may overlap.

        A size of 0 is not counted.
        """
        # Two batches are on their way at a time: the second one's time begins when the first has ended.
        rate = size / max(ended - max(started, self._last_end), 1e-6)
        self._last_end = ended
        if not size:
            return
        self._rate = (1 - _WEIGHT) * self._rate + _WEIGHT * rate if self._rate else rate

    def seconds(self, size: int) -> float:
        """An estimate for so much work, at least 0.1; 1 when nothing is known yet."""
        return max(0.1, size / self._rate) if self._rate else 1.0


Describe = Callable[[Sequence[P]], tracing.Attributes]
"""A batch's attributes by its payloads."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """One batch that ran: entries, their summed size, milliseconds in the engine."""

    entries: int
    size: int
    run_ms: float


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
        describe: Describe[P] = lambda _: {},
    ) -> None:
        self.name = name
        self._depth = depth
        self._cost = cost
        self._batch = budget
        self._max_queued = max_queued
        self._max_wait = max_wait
        self._observe = observe
        self._dropped = dropped
        self._on_death = died
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[P, R] = FairQueue()
        self._waiting = Budget(lambda: self.limit)
        self._empty = asyncio.Event()
        self._empty.set()
        self._pace = Pace()
        self._slot: Slot[P, R] = Slot(cost, budget)
        self._closed = False
        self._engine = EngineThread(name, launch, self._slot, depth=depth, owner=self)

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
        return self._engine.running_seconds

    def check(self, size: int, client: str = "") -> None:
        """Raise what ``submit`` would raise."""
        if self._engine.dead is not None:
            raise EngineDead(self._engine.dead.message)
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
        if not admitted or self._closed or self._engine.dead is not None:
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
        await asyncio.to_thread(self._engine.join)

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
        self._slot.fill(self._queue)
        self._settle()

    def _settle(self) -> None:
        if not self._waiting.used:
            self._empty.set()

    def _trace(
        self, entries: list[Entry[P, R]], started: float, ended: float, error: Exception | None = None
    ) -> None:
        tracing.batch_ran(
            self.name,
            (entry.asked for entry in entries),
            started,
            ended,
            lambda: self._describe([entry.payload for entry in entries]),
            error,
        )

    # What the engine thread tells.

    def taken(self, alive: list[Entry[P, R]], dead: list[Entry[P, R]], at: float) -> None:
        for entry in alive:
            self._waiting.give(entry.client, entry.size)
        self._give_up(dead)
        self._feed()
        tracing.batch_queued(self.name, ((entry.asked, entry.enqueued) for entry in alive), at)

    def deliver(self, entries: list[Entry[P, R]], values: Sequence[R], started: float, ended: float) -> None:
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
        self._trace(entries, started, ended)

    def broke(self, entries: list[Entry[P, R]], error: Exception, started: float, ended: float) -> None:
        self._trace(entries, started, ended, error)

    def died(self, error: EngineDead) -> None:
        self._on_death(error)

    def fail(self, entries: list[Entry[P, R]], error: TesseraError) -> None:
        for entry in entries:
            if entry.future.cancelled():
                entry.abandoned()
            else:
                entry.future.set_exception(error)

    def forsake(self, entries: list[Entry[P, R]]) -> None:
        """Cancelled entries of a batch that failed; they will not run again."""
        for entry in entries:
            entry.abandoned()
            self._dropped()
