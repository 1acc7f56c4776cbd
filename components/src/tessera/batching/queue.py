"""Entries that wait for an engine: the order in which they are served, and the next batch of them."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from opentelemetry.trace import Span

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


# Of every nine parts of work that are served while several priorities wait, one goes to the oldest entry.
_OVERTAKE: Final = 8


class FairQueue(Generic[P, R]):
    """Smaller priorities first; within one, start-time fair queueing between clients.

    The latter as by Goyal, Vin and Cheng, 1996: an entry's tag is the virtual time at which its client's
    earlier entries are through, so that clients share by size whatever they send, and one client alone is
    served in order. So that a stream of urgent work does not keep the rest waiting for ever, an entry of any
    priority that has come to be the oldest is served after at most eight times its own size. Owned by one
    event loop.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Entry[P, R]]] = []
        self._arrivals: deque[Entry[P, R]] = deque()
        self._finish: dict[str, int] = {}
        self._now = 0
        self._sequence = 0
        self._stale = 0
        self._mixed = False
        self._overtaken = 0

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def push(self, entry: Entry[P, R]) -> None:
        start = max(self._now, self._finish.get(entry.client, 0))
        self._finish[entry.client] = start + entry.size
        self._sequence += 1
        if self._heap and entry.priority != self._heap[0][0]:
            self._mixed = True
        entry.in_queue = True
        heapq.heappush(self._heap, (entry.priority, start, self._sequence, entry))
        self._arrivals.append(entry)

    def head(self) -> Entry[P, R]:
        """The entry whose turn it is; the queue must not be empty."""
        oldest = self._arrivals[0]
        if self._mixed and self._overtaken >= _OVERTAKE * oldest.size:
            return oldest
        return self._heap[0][3]

    def pop(self) -> Entry[P, R]:
        """Take out ``head``."""
        entry = self.head()
        if entry is self._heap[0][3]:
            self._now = max(self._now, self._heap[0][1])
            heapq.heappop(self._heap)
        else:
            self._stale += 1
        self._overtaken = 0 if entry is self._arrivals[0] else self._overtaken + entry.size
        entry.in_queue = False
        self._trim()
        return entry

    def remove(self, entry: Entry[P, R]) -> None:
        """Take out an entry before its turn."""
        entry.in_queue = False
        self._stale += 1
        self._trim()
        if self._stale > 64 and self._stale > len(self._heap) // 2:
            self._heap = [item for item in self._heap if item[3].in_queue]
            heapq.heapify(self._heap)
            self._arrivals = deque(entry for entry in self._arrivals if entry.in_queue)
            self._stale = 0

    def _trim(self) -> None:
        # An entry that left out of turn is still in one of the two, perhaps in both.
        while self._heap and not self._heap[0][3].in_queue:
            heapq.heappop(self._heap)
            self._stale -= 1
        while self._arrivals and not self._arrivals[0].in_queue:
            self._arrivals.popleft()
        if not self._arrivals:
            self._finish.clear()
            self._now = self._stale = self._overtaken = 0
            self._mixed = False


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

    def fill(self, queue: FairQueue[P, R]) -> None:
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
