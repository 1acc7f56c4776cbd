"""The thread that keeps one engine busy: takes whole batches and reports what becomes of them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, TypeVarTuple, Unpack

from tessera.batching.pace import Pace
from tessera.batching.queue import Entry, OpenBatch, P, R, requests_of
from tessera.budgets import Clock
from tessera.errors import EngineDead, EngineFailed, TesseraError
from tessera.launched import Launched

log = logging.getLogger(__name__)

R_co = TypeVar("R_co", covariant=True)
Ts = TypeVarTuple("Ts")

# How long the thread looks for a next batch before it looks at the launched ones again.
_PEEK_SECONDS = 0.0002


class Values(Protocol[R_co]):
    """The values of a batch, one for each of its payloads, in order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[R_co]: ...


Launch = Callable[[Sequence[P]], Launched[Values[R]]]
"""Starts a batch of payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports(Generic[P, R]):
    """Callbacks of the engine thread, called on the event loop in the order in which things happened.

    ``taken`` is called with the entries that the engine is about to run and a reading of ``perf_counter``;
    ``ran`` with those of a batch, their values, and when it began and ended; ``failed`` with those of a batch
    that raised, the times and the error, and what the entries fail with, None when halves are tried;
    ``cancelled`` with those that were cancelled before they ran, or before a half of their failed batch did;
    ``died`` once, when the engine has raised ``EngineDead`` or its thread anything unforeseen.
    """

    taken: Callable[[list[Entry[P, R]], float], None]
    ran: Callable[[list[Entry[P, R]], Values[R], float, float], None]
    cancelled: Callable[[list[Entry[P, R]]], None]
    failed: Callable[[list[Entry[P, R]], float, float, Exception, TesseraError | None], None]
    died: Callable[[EngineDead], None]


@dataclass(slots=True)
class _InFlight(Generic[P, R]):
    entries: list[Entry[P, R]]
    launched: Launched[Values[R]]
    started: float
    size: int


class EngineThread(Generic[P, R]):
    """Launches batches from ``batch``, ``depth`` at a time, until it is closed and empty.

    Behind one that runs the next is launched when it is full, or when that one is about to end (``Pace``);
    behind one that tells when it is done, only when it is full.
    A batch that fails is halved until the entries at fault stand alone. Once the engine has raised
    ``EngineDead`` (kept in ``dead``) nothing is launched any more and everything fails with it. An error
    outside a batch is such a death, too: the thread itself goes on, so that every entry is settled, until it
    is closed.
    """

    def __init__(
        self,
        name: str,
        launch: Launch[P, R],
        batch: OpenBatch[P, R],
        *,
        depth: int,
        reports: Reports[P, R],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.dead: EngineDead | None = None
        self._name = name
        self._launch = launch
        self._batch = batch
        self._depth = depth
        self._reports = reports
        self._clock = clock
        self._pace = Pace() if depth > 1 else None
        self._loop = asyncio.get_running_loop()
        self._post = self._loop.call_soon_threadsafe
        self._running_since = math.inf
        self._in_flight: deque[_InFlight[P, R]] = deque()
        # Taken from the open batch, and not reported as ended yet.
        self._taken: set[Entry[P, R]] = set()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def running_seconds(self) -> float:
        """How long the oldest batch has been in the engine; 0 when none is."""
        return max(0.0, self._clock() - self._running_since)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        # Without a loop nobody waits for anything any more.
        while not self._loop.is_closed():
            try:
                if error is not None:
                    self._give_up(error)
                self._run_batches()
                return
            except BaseException as raised:
                error = raised

    def _give_up(self, error: BaseException) -> None:
        """Fail whatever the thread holds, and have everything after it fail."""
        log.error("%s engine: its thread failed", self._name, exc_info=error)
        now = self._clock()
        dead = self._died(EngineDead(f"the {self._name} engine failed: {type(error).__name__}: {error}"))
        self._in_flight.clear()
        self._end(self._reports.failed, list(self._taken), now, now, dead, dead)

    def _run_batches(self) -> None:
        in_flight = self._in_flight
        while True:
            self._running_since = in_flight[0].started if in_flight else math.inf
            full = len(in_flight) >= self._depth
            # One that has told is reported first: what is launched behind it might be computed at once.
            over = bool(in_flight) and in_flight[0].launched.tells and in_flight[0].launched.done()
            taken = [] if full or over else self._next()
            if taken is None and not in_flight:
                return
            if taken:
                self._taken.update(taken)
                entries = self._without_cancelled(taken)
                self._post(self._reports.taken, entries, self._clock())
                self._start(entries, in_flight)
            if in_flight and (full or in_flight[0].launched.done() or taken is None):
                self._finish(in_flight.popleft())

    def _next(self) -> list[Entry[P, R]] | None:
        if self._pace is None or not self._in_flight:
            return self._batch.take(None)
        first = self._in_flight[0]
        if first.launched.tells:
            return self._batch.take(None, full=True, until=first.launched.done)
        size = sum(batch.size for batch in self._in_flight)
        due = self._pace.due(size, first.started, self._batch.size, self._clock())
        return self._batch.take(_PEEK_SECONDS, full=not due)

    def _without_cancelled(self, entries: list[Entry[P, R]]) -> list[Entry[P, R]]:
        # Each flag is read once: the event loop may set it at any moment, and an entry is either run or not.
        kept: list[Entry[P, R]] = []
        cancelled: list[Entry[P, R]] = []
        for entry in entries:
            (cancelled if entry.cancelled else kept).append(entry)
        if cancelled:
            self._end(self._reports.cancelled, cancelled)
        return kept

    def _start(self, entries: list[Entry[P, R]], in_flight: deque[_InFlight[P, R]]) -> None:
        if not entries:
            return
        started = self._clock()
        if not in_flight:
            self._running_since = started
        try:
            if self.dead is not None:
                raise EngineDead(self.dead.message)
            launched = self._launch([entry.payload for entry in entries])
        except Exception as error:
            self._fail(entries, error, started)
            return
        size = sum(entry.size for entry in entries)
        if self._pace is not None:
            self._pace.launched(size, self._clock() - started)
        launched.when_done(self._batch.wake)
        in_flight.append(_InFlight(entries, launched, started, size))

    def _finish(self, batch: _InFlight[P, R]) -> None:
        try:
            values = batch.launched.result()
            if len(values) != len(batch.entries):
                raise EngineFailed(
                    f"the {self._name} engine gave {len(values)} results for {len(batch.entries)} entries"
                )
        except Exception as error:
            self._fail(batch.entries, error, batch.started)
            return
        ended = self._clock()
        if self._pace is not None:
            self._pace.ran(batch.size, batch.started, ended)
        self._end(self._reports.ran, batch.entries, values, batch.started, ended)

    def _fail(self, entries: list[Entry[P, R]], error: Exception, started: float) -> None:
        ended = self._clock()
        if isinstance(error, EngineDead):
            self._died(error)
            self._end(self._reports.failed, entries, started, ended, error, error)
        elif len(entries) == 1:
            self._end(self._reports.failed, entries, started, ended, error, self._final(entries, error))
        else:
            self._post(self._reports.failed, entries, started, ended, error, None)
            self._halve(entries, error)

    def _died(self, error: EngineDead) -> EngineDead:
        """Report the engine's death, once; returns the error that it died of."""
        if self.dead is None:
            self.dead = error
            log.critical("%s engine: %s", self._name, error)
            self._post(self._reports.died, error)
        return self.dead

    def _final(self, entries: list[Entry[P, R]], error: Exception) -> TesseraError:
        if isinstance(error, TesseraError):
            return error
        log.error("%s engine: %s: %s", self._name, type(error).__name__, error, extra=requests_of(entries))
        return EngineFailed(f"the {self._name} engine failed: {error}")

    def _halve(self, entries: list[Entry[P, R]], error: Exception) -> None:
        """One entry must not fail the batch it is in: halve until it is alone."""
        log.warning(
            "%s engine: a batch of %d failed (%s); trying halves",
            *(self._name, len(entries), error),
            extra=requests_of(entries),
        )
        middle = len(entries) // 2
        for half in (entries[:middle], entries[middle:]):
            in_flight: deque[_InFlight[P, R]] = deque()
            self._start(self._without_cancelled(half), in_flight)
            if in_flight:
                self._finish(in_flight.popleft())

    def _end(
        self,
        report: Callable[[list[Entry[P, R]], Unpack[Ts]], None],
        entries: list[Entry[P, R]],
        *facts: *Ts,
    ) -> None:
        """Report what became of these entries in the end."""
        self._post(report, entries, *facts)
        self._taken.difference_update(entries)
