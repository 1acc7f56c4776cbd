"""Entries that wait for an engine, and the next batch of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from opentelemetry.trace import Span

from tessera.budgets import FairQueue
from tessera.errors import TesseraError
from tessera.logs import RequestLine

P = TypeVar("P")
R = TypeVar("R")

_MOST_NAMED = 16


class Outcome(NamedTuple, Generic[R]):
    """A result with the milliseconds it waited and ran."""

    value: R
    queue_ms: float
    run_ms: float


@dataclass(slots=True, eq=False)
class Entry(Generic[P, R]):
    """One payload on its way to the engine.

    ``size`` counts tokens or units; ``client`` is whose share it counts against, smaller ``priority`` is
    sooner; ``enqueued`` is a reading of ``perf_counter``. On the event loop one of two is called, once:
    ``settle`` with what became of it, or ``on_cancelled`` when it was cancelled and the engine will not touch
    the payload any more: only then may memory that the payload names be used for something else.
    ``line`` is the log line of its request, where there is one, and ``span`` the span that the work is for,
    where there is one that is kept. ``in_queue``: a ``FairQueue`` holds it. ``waiting``: its size counts
    among what waits. ``cancelled`` is set by the event loop and read by the engine thread.
    """

    payload: P
    size: int
    client: str
    priority: int
    settle: Callable[[Outcome[R] | TesseraError], None]
    enqueued: float
    on_cancelled: Callable[[], None]
    line: RequestLine | None = None
    span: Span | None = None
    in_queue: bool = False
    waiting: bool = True
    cancelled: bool = False


def requests_of(entries: Sequence[Entry[P, R]]) -> dict[str, dict[str, str]]:
    """What a log record about them says of their requests (``extra``)."""
    ids = list(
        dict.fromkeys(entry.line.request_id for entry in entries if entry.line and entry.line.request_id)
    )
    if len(ids) == 1:
        return {"fields": {"request_id": ids[0]}}
    return {"fields": {"request_ids": ",".join(ids[:_MOST_NAMED])}} if ids else {}


Cost = Callable[[int, int, int], int]


class OpenBatch(Generic[P, R]):
    """Holds the entries of the next batch until the engine thread takes them.

    A batch that was closed early would run with the one or two entries that had arrived when the engine began
    the previous one; an open one grows to the budget for as long as the engine is busy.
    """

    def __init__(self, cost: Cost, budget: int) -> None:
        self._cost = cost
        self._budget = budget
        self._entries: list[Entry[P, R]] = []
        self._total = 0
        self._longest = 0
        # Something did not fit, and waits for the next one.
        self._full = False
        self._closed = False
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Of its entries together."""
        return self._total

    def add(self, entry: Entry[P, R]) -> bool:
        """Add the entry if the budget allows; an entry over the budget runs alone. Event loop only.

        An engine that waits for work does not learn of it before ``wake``.
        """
        with self._changed:
            added = self._add(entry)
            if not added:
                self._changed.notify()
            return added

    def wake(self) -> None:
        """Tell an engine that waits what was added, or that it may wait for no longer."""
        with self._changed:
            self._changed.notify()

    def fill(self, queue: FairQueue[Entry[P, R]]) -> None:
        """Move entries from the queue's head for as long as the budget allows. Event loop only.

        All under one lock: the engine, if it is idle, would otherwise run the first of them alone.
        """
        with self._changed:
            while queue and self._add(queue.head()):
                queue.pop()
            self._changed.notify()

    def _add(self, entry: Entry[P, R]) -> bool:
        total, longest = self._total + entry.size, max(self._longest, entry.size)
        if self._entries and self._cost(len(self._entries) + 1, total, longest) > self._budget:
            self._full = True
            return False
        self._entries.append(entry)
        self._total, self._longest = total, longest
        return True

    def take(
        self, timeout: float | None, *, full: bool = False, until: Callable[[], bool] = lambda: False
    ) -> list[Entry[P, R]] | None:
        """The entries as they are now, after at most ``timeout`` seconds for a first one; None when closed.

        With ``full`` none, unless the batch has no room for what waits behind it. ``until`` ends the wait
        without any, too; it is asked after every ``wake``. Engine thread only.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (self._full if full else self._entries) or self._closed or until(), timeout
            )
            if self._closed and not self._entries:
                return None
            if full and not self._full and not self._closed:
                return []
            taken, self._entries = self._entries, []
            self._total = self._longest = 0
            self._full = False
            return taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
