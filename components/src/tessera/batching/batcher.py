"""Batches work across requests for one engine.

The event loop owns the queue and fills the next batch; the ``EngineThread`` takes whole batches and never
waits for the loop. Results come back in one call for each batch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypedDict, Unpack

from tessera import tracing
from tessera.batching.engine_thread import EngineThread, Launch, Reports, Values
from tessera.batching.queue import Cost, Entry, OpenBatch, Outcome, P, R
from tessera.budgets import Budget, Clock, FairQueue
from tessera.errors import EngineDead, TesseraError, Unavailable
from tessera.logs import current_line
from tessera.tasks import Promise

_WEIGHT: Final = 0.2


class Throughput:
    """Size per second of engine time, as a moving average over batches."""

    def __init__(self) -> None:
        self.rate = 0.0
        """0 until a batch has been counted."""
        self._last_end = 0.0

    def add(self, size: int, started: float, ended: float) -> None:
        """Count a batch that ran between two readings of one clock, in seconds; batches may overlap.

        A size of 0 only moves the time at which the engine was last busy.
        """
        # Two batches are launched at a time: the second one's time begins when the first has ended.
        rate = size / max(ended - max(started, self._last_end), 1e-6)
        self._last_end = ended
        if not size:
            return
        self.rate = (1 - _WEIGHT) * self.rate + _WEIGHT * rate if self.rate else rate

    def seconds(self, size: int) -> float:
        """An estimate of the time for that size, at least 0.1; 1 when nothing is known yet."""
        return max(0.1, size / self.rate) if self.rate else 1.0


def _ignore(*_: object) -> None:
    pass


class Options(TypedDict, total=False):
    """What may be said of a payload; see ``Batcher.put``."""

    client: str
    priority: int
    admitted: bool
    on_cancelled: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events(Generic[P]):
    """Callbacks of a batcher, on its event loop.

    After each batch that gave results, ``entries`` with their number, each of ``sizes`` with their summed
    size, and ``seconds`` with the time in the engine; ``cancelled`` for each entry that was cancelled before
    it ran; ``died`` once, when the engine has raised ``EngineDead`` or its thread anything else: nothing is
    run any more. ``attributes`` gives those of a batch of payloads, for batches that are recorded in a trace.
    """

    entries: Callable[[float], None] = _ignore
    sizes: Sequence[Callable[[float], None]] = ()
    seconds: Callable[[float], None] = _ignore
    cancelled: Callable[[], None] = _ignore
    died: Callable[[EngineDead], None] = _ignore
    attributes: Callable[[Sequence[P]], tracing.Attributes] = lambda _: {}


class Batcher(Generic[P, R]):
    """Queues payloads by size and runs them in batches on a thread of its own.

    ``budget`` bounds what a batch costs; ``depth`` batches may be launched and unfinished at a time.
    ``max_queued`` bounds the size that may wait behind those, were they full, and ``max_wait`` the seconds
    that running it would take.
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
        events: Events[P] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name = name
        self._depth = depth
        self._cost = cost
        self._budget = budget
        self._max_queued = max_queued
        self._max_wait = max_wait
        self._events: Events[P] = Events() if events is None else events
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._queue: FairQueue[Entry[P, R]] = FairQueue()
        # What the engine has of its batches leaves the rest of them to what waits: callers are told the
        # capacity, and what they keep to must not be refused because batches are not full.
        self._waiting = Budget(
            lambda: self.capacity - self._running,
            f"the {name} queue",
            "waiting",
            retry_after=self.seconds_to_drain,
        )
        self._running = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._throughput = Throughput()
        self._open: OpenBatch[P, R] = OpenBatch(cost, budget)
        self._closed = False
        self._waking = False
        self._engine: EngineThread[P, R] = EngineThread(
            name,
            launch,
            self._open,
            depth=depth,
            reports=Reports(
                taken=self._taken,
                ran=self._ran,
                cancelled=self._cancelled,
                failed=self._failed,
                died=self._died,
            ),
            clock=clock,
        )

    @property
    def queued(self) -> int:
        """Size of what has been submitted and is not in the engine yet."""
        return self._waiting.used

    @property
    def limit(self) -> int:
        """Size that may wait behind full batches, at the present throughput."""
        if math.isinf(self._max_wait) or not self._throughput.rate:
            return self._max_queued
        # However slow the engine is, the next batch may always be full.
        return min(self._max_queued, max(self._budget, int(self._throughput.rate * self._max_wait)))

    @property
    def capacity(self) -> int:
        """Size that may be here at a time: waiting, or in the engine."""
        return self.limit + self._depth * self._budget

    @property
    def running_seconds(self) -> float:
        """How long the oldest batch has been in the engine; 0 when none is."""
        return self._engine.running_seconds

    def admits(self, size: int, client: str = "") -> bool:
        """Whether so much of the client's has room."""
        return self._waiting.admits(client, size)

    def check(self, size: int, client: str = "") -> None:
        """Raise what ``submit`` would raise."""
        if self._engine.dead is not None:
            raise EngineDead(self._engine.dead.message)
        if self._closed:
            raise Unavailable(f"the {self.name} engine is closing")
        self._waiting.check(client, size)

    def submit(self, payload: P, size: int, **options: Unpack[Options]) -> asyncio.Future[Outcome[R]]:
        """Queue one payload as ``put`` does; cancelling the future cancels it."""
        promise: Promise[Outcome[R]] = Promise(loop=self._loop)
        entry = self.put(payload, size, promise.settle, **options)
        promise.when_cancelled = partial(self.cancel, entry)
        return promise

    def put(
        self,
        payload: P,
        size: int,
        settle: Callable[[Outcome[R] | TesseraError], None],
        *,
        client: str = "",
        priority: int = 0,
        admitted: bool = False,
        on_cancelled: Callable[[], None] = _ignore,
    ) -> Entry[P, R]:
        """Queue one payload; ``settle`` is called with its result or its error, unless it is cancelled.

        ``client`` is whom it is for: clients share the queue and the engine by size. Of what waits, smaller
        ``priority`` goes first. ``admitted`` says that the caller has asked before (``check``) and must not
        be refused now. ``on_cancelled`` is called after a cancellation, once the engine is done with the
        payload. Raises ``Overloaded`` when the queue is full, ``Unavailable`` after ``close``, ``EngineDead``
        when there is no engine any more.
        """
        if not admitted or self._closed or self._engine.dead is not None:
            self.check(size, client)
        entry: Entry[P, R] = Entry(
            *(payload, size, client, priority, settle, self._clock(), on_cancelled),
            line=current_line(),
            span=tracing.here(),
        )
        self._waiting.take(client, size)
        self._empty.clear()
        if self._queue or not self._open.add(entry):
            self._queue.push(entry)
            if self._queue.head() is entry:
                self._open.fill(self._queue)
        elif not self._waking:
            # Once for all that are put in this round of the loop. An engine that is idle would otherwise run
            # the first of them alone, and waking it takes as long as all else that is done here.
            self._waking = True
            self._loop.call_soon(self._wake)
        return entry

    def cancel(self, entry: Entry[P, R]) -> None:
        """Take an entry that is not settled out, if the engine has not begun it; it is settled no more."""
        entry.cancelled = True
        # Outside the queue it is the engine thread that finds the flag, and reports it.
        if entry.in_queue:
            self._queue.remove(entry)
            self._cancelled([entry])

    async def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._closed = True
        await self._empty.wait()
        self._open.close()
        await asyncio.to_thread(self._engine.join)

    def seconds_to_drain(self, size: int | None = None) -> float:
        """An estimate for that size, or for what is queued now."""
        return self._throughput.seconds(self.queued if size is None else size)

    def _wake(self) -> None:
        self._waking = False
        self._open.wake()

    def _cancelled(self, entries: Sequence[Entry[P, R]]) -> None:
        for entry in entries:
            self._leave(entry)
            entry.on_cancelled()
            self._events.cancelled()

    def _release(self, entry: Entry[P, R]) -> None:
        """Give back the room that it holds among what waits."""
        entry.waiting = False
        self._waiting.give(entry.client, entry.size)
        if not self._waiting.used:
            self._empty.set()

    def _leave(self, entry: Entry[P, R]) -> None:
        """Give back the room that it holds, wherever it is."""
        if entry.waiting:
            self._release(entry)
        else:
            self._running -= entry.size

    def _taken(self, entries: list[Entry[P, R]], at: float) -> None:
        for entry in entries:
            self._release(entry)
            self._running += entry.size
        if self._queue:
            self._open.fill(self._queue)
        if tracing.recording():
            tracing.batch_queued(self.name, ((entry.span, entry.enqueued) for entry in entries), at)

    def _died(self, error: EngineDead) -> None:
        self._events.died(error)
        # What waits behind a batch that never came to be reported as taken fails, too.
        self._open.fill(self._queue)

    def _ran(self, entries: list[Entry[P, R]], values: Values[R], started: float, ended: float) -> None:
        run_ms = (ended - started) * 1e3
        size = longest = 0
        for entry, value in zip(entries, values, strict=True):
            self._leave(entry)
            size += entry.size
            longest = max(longest, entry.size)
            if entry.cancelled:
                entry.on_cancelled()
            else:
                entry.settle(Outcome(value, (started - entry.enqueued) * 1e3, run_ms))
        # Small batches are slow for their size, and say nothing of what the engine does under load.
        full = 2 * self._cost(len(entries), size, longest) >= self._budget
        self._throughput.add(size if full else 0, started, ended)
        self._events.entries(len(entries))
        for observe in self._events.sizes:
            observe(size)
        self._events.seconds(run_ms / 1e3)
        if tracing.recording():
            self._trace(entries, started, ended)

    def _failed(
        self,
        entries: list[Entry[P, R]],
        started: float,
        ended: float,
        error: Exception,
        final: TesseraError | None,
    ) -> None:
        if tracing.recording():
            self._trace(entries, started, ended, error)
        if final is None:
            return
        for entry in entries:
            self._leave(entry)
            if entry.cancelled:
                entry.on_cancelled()
            else:
                entry.settle(final)

    def _trace(
        self, entries: list[Entry[P, R]], started: float, ended: float, error: Exception | None = None
    ) -> None:
        tracing.batch_ran(
            self.name,
            [entry.span for entry in entries],
            *(started, ended),
            lambda: self._events.attributes([entry.payload for entry in entries]),
            error,
        )
