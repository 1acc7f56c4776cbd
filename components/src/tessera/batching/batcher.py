"""Batches work across requests for one engine.

The event loop owns the queue; the engine thread takes whole batches from a ``Slot`` and never waits for
the loop. Replies go back in one hop for each batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tessera.batching.entry import Entry, Outcome, P, R
from tessera.batching.slot import Cost, Slot
from tessera.errors import EngineFailed, Overloaded, TesseraError, Unavailable

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

    ``budget`` bounds what a batch costs and ``max_queued`` the size that may wait; ``depth`` batches may be
    launched and unfinished at a time. ``observe`` is called on the event loop after each batch.
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
        observe: Callable[[BatchStats], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._launch = launch
        self._depth = depth
        self._max_queued = max_queued
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Entry[P, R]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queued = 0
        self._rate = 0.0
        self._slot: Slot[P, R] = Slot(cost, budget)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Size of what has been submitted and is not in the engine yet."""
        return self._queued

    def submit(
        self, payload: P, size: int, *, abandoned: Callable[[], None] = lambda: None
    ) -> asyncio.Future[Outcome[R]]:
        """Queue one payload. Cancelling the future drops it, if the engine has not begun it.

        ``abandoned`` is called after a cancellation, once the engine is done with the payload. Raises
        ``Overloaded`` when ``max_queued`` would be passed, ``Unavailable`` after ``close``.
        """
        if self._closed:
            raise Unavailable(f"the {self.name} engine is closing")
        if self._queued and self._queued + size > self._max_queued:
            raise Overloaded(
                f"the {self.name} queue is full ({self._queued} of {self._max_queued})",
                retry_after=self.seconds_to_drain(),
            )
        entry: Entry[P, R] = Entry(payload, size, self._loop.create_future(), time.perf_counter(), abandoned)
        entry.future.add_done_callback(lambda future: self._drop(entry) if future.cancelled() else None)
        self._queued += size
        self._queue.append(entry)
        self._empty.clear()
        self._feed()
        return entry.future

    async def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._closed = True
        await self._empty.wait()
        self._slot.close()
        await asyncio.to_thread(self._thread.join)

    def seconds_to_drain(self) -> float:
        """An estimate for what is queued now."""
        return max(0.1, self._queued / self._rate) if self._rate else 1.0

    def _drop(self, entry: Entry[P, R]) -> None:
        entry.dropped = True

    def _feed(self) -> None:
        while self._queue:
            entry = self._queue[0]
            if not entry.dropped and not self._slot.offer(entry):
                return
            self._queue.popleft()
            if entry.dropped:
                self._queued -= entry.size
                entry.abandoned()
        self._empty.set()

    # What follows runs on the engine thread.

    def _run(self) -> None:
        launched: deque[_InFlight[P, R]] = deque()
        while True:
            full = len(launched) >= self._depth
            taken = [] if full else self._slot.take(_PEEK_SECONDS if launched else None)
            if taken is None and not launched:
                return
            if taken:
                alive, dead = _part(taken)
                self._loop.call_soon_threadsafe(self._taken, taken, dead)
                if alive:
                    self._start(alive, launched)
            if launched and (full or launched[0].running.done() or taken is None):
                self._finish(launched.popleft())

    def _start(self, entries: list[Entry[P, R]], launched: deque[_InFlight[P, R]]) -> None:
        started = time.perf_counter()
        try:
            running = self._launch([entry.payload for entry in entries])
        except Exception as error:
            self._failed(entries, error)
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
            self._failed(batch.entries, error)
            return
        self._loop.call_soon_threadsafe(
            self._deliver, batch.entries, values, batch.started, time.perf_counter()
        )

    def _failed(self, entries: list[Entry[P, R]], error: Exception) -> None:
        if len(entries) == 1:
            failure = (
                error
                if isinstance(error, TesseraError)
                else EngineFailed(f"the {self.name} engine failed: {error}")
            )
            if failure is not error:
                log.error("%s engine: %s: %s", self.name, type(error).__name__, error)
            self._loop.call_soon_threadsafe(self._fail, entries[0], failure)
            return
        # One entry must not fail the batch it rode in: halve until it stands alone.
        log.warning("%s engine: a batch of %d failed (%s); trying halves", self.name, len(entries), error)
        middle = len(entries) // 2
        for half in (entries[:middle], entries[middle:]):
            launched: deque[_InFlight[P, R]] = deque()
            self._start(half, launched)
            if launched:
                self._finish(launched.popleft())

    # What follows runs on the event loop again.

    def _taken(self, entries: list[Entry[P, R]], dead: list[Entry[P, R]]) -> None:
        self._queued -= sum(entry.size for entry in entries)
        for entry in dead:
            entry.abandoned()
        self._feed()

    def _deliver(self, entries: list[Entry[P, R]], values: Sequence[R], started: float, ended: float) -> None:
        run_ms = (ended - started) * 1e3
        size = 0
        for entry, value in zip(entries, values, strict=True):
            size += entry.size
            if entry.future.cancelled():
                entry.abandoned()
            else:
                entry.future.set_result(Outcome(value, (started - entry.enqueued) * 1e3, run_ms))
        rate = size / max(ended - started, 1e-6)
        self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
        self._observe(BatchStats(len(entries), size, run_ms))

    def _fail(self, entry: Entry[P, R], error: TesseraError) -> None:
        if entry.future.cancelled():
            entry.abandoned()
        else:
            entry.future.set_exception(error)


def _part(entries: list[Entry[P, R]]) -> tuple[list[Entry[P, R]], list[Entry[P, R]]]:
    # Each flag is read once: the event loop may set it at any moment, and an entry is either run or not.
    alive: list[Entry[P, R]] = []
    dead: list[Entry[P, R]] = []
    for entry in entries:
        (dead if entry.dropped else alive).append(entry)
    return alive, dead
