"""What waits for an engine: entries, and the order in which they are served."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from opentelemetry.trace import Span

P = TypeVar("P")
R = TypeVar("R")

_MOST_NAMED = 16


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """A result with the milliseconds it waited and ran."""

    value: R
    queue_ms: float
    run_ms: float


@dataclass(slots=True, eq=False)
class Entry(Generic[P, R]):
    """``size`` counts tokens or tiles; ``client`` is who shares with whom, ``priority`` smaller is sooner.

    ``left_queue`` says that it holds no place in the queue any more. ``dropped`` is set by the event loop and
    read by the engine thread. ``abandoned`` is called once, on the event loop, when the future was
    cancelled and the engine will not touch the payload any more: only then may memory that the payload names
    be used for something else. ``request_id`` is for the log, empty where none is known; ``asked`` is the
    span that the work is for, where there is one that is kept.
    """

    payload: P
    size: int
    client: str
    priority: int
    future: asyncio.Future[Outcome[R]]
    enqueued: float
    abandoned: Callable[[], None]
    request_id: str = ""
    left_queue: bool = field(default=False)
    dropped: bool = field(default=False)
    asked: Span | None = field(default=None)


def requests_of(entries: Sequence[Entry[P, R]]) -> dict[str, dict[str, str]]:
    """What a log record about them says of their requests (``extra``)."""
    ids = list(dict.fromkeys(entry.request_id for entry in entries if entry.request_id))
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
        entry.left_queue = True
        self._trim()
        return entry

    def discard(self, entry: Entry[P, R]) -> None:
        """Take out an entry before its turn."""
        entry.left_queue = True
        self._stale += 1
        self._trim()
        if self._stale > 64 and self._stale > len(self._heap) // 2:
            self._heap = [item for item in self._heap if not item[3].left_queue]
            heapq.heapify(self._heap)
            self._arrivals = deque(entry for entry in self._arrivals if not entry.left_queue)
            self._stale = 0

    def _trim(self) -> None:
        # Whoever left out of turn is still in the other of the two, and perhaps in both.
        while self._heap and self._heap[0][3].left_queue:
            heapq.heappop(self._heap)
            self._stale -= 1
        while self._arrivals and self._arrivals[0].left_queue:
            self._arrivals.popleft()
        if not self._arrivals:
            self._finish.clear()
            self._now = self._stale = self._overtaken = 0
            self._mixed = False
