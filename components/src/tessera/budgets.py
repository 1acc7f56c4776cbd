"""Budgets of work: a bounded amount shared fairly among clients, their order, and a rate."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from tessera.errors import Overloaded

_FACTOR: Final = 4
# Another process may give back what is waited for, and tells nobody.
_LOOK_SECONDS: Final = 0.01


class Holder(Protocol):
    """A request, which holds bytes of a budget until its answer."""

    held_bytes: int


class Budget:
    """Counts what is in use, in tokens or units, against a limit that may change at any time.

    A client may hold at most four times what it leaves free (dynamic thresholds: Choudhury and Hahne, 1998):
    one alone gets four fifths of the limit, two get four ninths each, and the last to come finds room in
    what the others had to leave. Where the limit falls below what one holds, that fifth is still there for
    those who hold nothing. Unnamed clients (``""``) are not told apart and share the whole. Errors name the
    ``whole`` and the ``unit``; ``refused`` is called for each. Owned by one event loop.
    """

    __slots__ = (
        "_held",
        "_limit",
        "_lines",
        "_retry_after",
        "_unit",
        "_used",
        "_waiting",
        "_whole",
        "refused",
    )

    def __init__(
        self,
        limit: Callable[[], int],
        whole: str = "the service",
        unit: str = "units",
        *,
        retry_after: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._limit = limit
        self._whole = whole
        self._unit = unit
        self._retry_after = retry_after
        self.refused: Callable[[], None] = lambda: None
        self._used = 0
        self._held: dict[str, int] = {}
        # Those who wait, by client.
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Of all clients, for each amount, in their order.
        self._waiting: list[Holder] = []

    @property
    def used(self) -> int:
        return self._used

    @property
    def limit(self) -> int:
        return self._limit()

    def held(self, client: str) -> int:
        """What a named client has in use."""
        return self._held.get(client, 0)

    def largest(self) -> int:
        """What the named client that holds most has in use."""
        return max(self._held.values(), default=0)

    def admits(self, client: str, amount: int) -> bool:
        """Whether ``take`` would keep to the rules; a first piece of any size always does."""
        used = self.used
        if not used:
            return True
        limit = self._limit()
        held = self.held(client) if client else 0
        if amount > limit - used:
            fits = used - self.largest() + amount <= limit // (_FACTOR + 1)
            return fits and bool(client) and not held
        return not held or held + amount <= _FACTOR * (limit - used - amount)

    def overloaded(self, client: str, amount: int, prefix: str = "") -> Overloaded:
        """Return the error of an amount that is not admitted: the whole is full, or the client's share used.

        The share is the most that the client may hold beside what the others hold now.
        """
        free, held = self._limit() - self.used, self.held(client) if client else 0
        why = f"{self._whole} is full ({self.used} of {self.limit} {self._unit})"
        if held and amount <= free:
            share = _FACTOR * (free + held) // (_FACTOR + 1)
            why = f"this API key's share of {self._whole} is used ({held} of {share} {self._unit})"
        return Overloaded(prefix + why, retry_after=self._retry_after())

    def check(self, client: str, amount: int) -> None:
        """Raise ``Overloaded`` for an amount that is not admitted."""
        if not self.admits(client, amount):
            self.refused()
            raise self.overloaded(client, amount)

    def hold(self, client: str, amount: int) -> None:
        """Take an amount; raises ``Overloaded`` where it is not admitted."""
        self.check(client, amount)
        self.take(client, amount)

    async def hold_in_turn(self, client: str, amount: int, seconds: float, holder: Holder) -> None:
        """Take an amount once it is admitted, behind what the client waits for already.

        Raises ``Overloaded`` where that is not within so many ``seconds``, and at once for the first of all
        who wait where these hold all there is: nobody else would give anything back.
        """
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = asyncio.Lock()
        self._waiting.append(holder)
        try:
            async with asyncio.timeout(seconds) as limit, line:
                # A look costs a few µs, and one client looks once, however much of its waits.
                while not self.admits(client, amount):
                    if self._waiting[0] is holder and self._all_wait():
                        limit.reschedule(0)
                    await asyncio.sleep(_LOOK_SECONDS)
                self.take(client, amount)
        except TimeoutError:
            if not limit.expired():
                raise
            self.refused()
            raise self.overloaded(client, amount) from None
        finally:
            self._waiting.remove(holder)

    def _all_wait(self) -> bool:
        return sum([holder.held_bytes for holder in set(self._waiting)]) >= self.used

    def take(self, client: str, amount: int) -> None:
        self._used += amount
        if client:
            held = self._held.pop(client, 0) + amount
            if held > 0:
                self._held[client] = held

    def give(self, client: str, amount: int) -> None:
        self.take(client, -amount)


class Queued(Protocol):
    """An entry of a ``FairQueue``, which alone sets ``in_queue``.

    ``size`` counts tokens, units, or characters; ``client`` is whose share it counts against, smaller
    ``priority`` is sooner.
    """

    in_queue: bool

    @property
    def size(self) -> int: ...

    @property
    def client(self) -> str: ...

    @property
    def priority(self) -> int: ...


W = TypeVar("W", bound=Queued)

# Of every nine parts of work that are served while several priorities wait, one goes to the oldest entry.
_OVERTAKE: Final = 8


class FairQueue(Generic[W]):
    """Smaller priorities first; within one, start-time fair queueing between clients.

    The latter as by Goyal, Vin and Cheng, 1996: an entry's tag is the virtual time at which its client's
    earlier entries are through, so that clients share by size whatever they send, and one client alone is
    served in order. So that a stream of urgent work does not keep the rest waiting for ever, an entry of any
    priority that has come to be the oldest is served after at most eight times its own size. Owned by one
    event loop.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, W]] = []
        self._arrivals: deque[W] = deque()
        self._finish: dict[str, int] = {}
        self._now = 0
        self._sequence = 0
        self._stale = 0
        self._mixed = False
        self._overtaken = 0

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def push(self, entry: W) -> None:
        start = max(self._now, self._finish.get(entry.client, 0))
        self._finish[entry.client] = start + entry.size
        self._sequence += 1
        if self._heap and entry.priority != self._heap[0][0]:
            self._mixed = True
        entry.in_queue = True
        heapq.heappush(self._heap, (entry.priority, start, self._sequence, entry))
        self._arrivals.append(entry)

    def head(self) -> W:
        """The entry whose turn it is; the queue must not be empty."""
        oldest = self._arrivals[0]
        if self._mixed and self._overtaken >= _OVERTAKE * oldest.size:
            return oldest
        return self._heap[0][3]

    def pop(self) -> W:
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

    def remove(self, entry: W) -> None:
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
            self._now = self._sequence = self._stale = self._overtaken = 0
            self._mixed = False


Clock = Callable[[], float]


class RetryBudget:
    """How many calls may be made again.

    A first call adds ``ratio`` of a retry, a second of time ``per_second``. The budget holds at most
    ``burst`` and begins full, so that all calls inside a worker that dies can move at once, while a lasting
    shortage adds no more than that share of load. Owned by one event loop.
    """

    def __init__(
        self,
        *,
        ratio: float = 0.2,
        per_second: float = 10.0,
        burst: float = 1024.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._ratio = ratio
        self._per_second = per_second
        self._burst = self._left = burst
        self._clock = clock
        self._at = clock()

    def called(self, count: int = 1) -> None:
        """Account for first calls."""
        self._left = min(self._burst, self._left + self._ratio * count)

    def take(self, count: int = 1) -> bool:
        """Spend retries; false, and nothing spent, when there are not so many."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < count:
            return False
        self._left -= count
        return True
