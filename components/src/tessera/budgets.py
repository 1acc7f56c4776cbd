"""Budgets of work: a bounded amount shared fairly among clients, their order, and a rate."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from tessera.errors import Overloaded, RateLimited

_FACTOR: Final = 4
# Another process may give back what is waited for, and tells nobody.
_LOOK_SECONDS: Final = 0.002

T = TypeVar("T")


class Lines:
    """Lets callers wait for room: those of one key in the order in which they came, each key by itself.

    A look costs a few µs, and one of a key looks, however many of it wait. Owned by one event loop.
    """

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def empty(self, key: Hashable) -> bool:
        """Return whether nobody waits under a key."""
        turn = self._turns.get(key)
        return turn is None or not turn.locked()

    async def wait(self, key: Hashable, take: Callable[[], T]) -> T:
        """Return what ``take`` gives, once it does not raise ``Overloaded``.

        Raises what else it does, ``RateLimited`` included: waiting does not help a key against its own rate
        any sooner than the client's next attempt.
        """
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = asyncio.Lock()
        async with turn:
            while True:
                try:
                    return take()
                except RateLimited:
                    raise
                except Overloaded:
                    await asyncio.sleep(_LOOK_SECONDS)


class Holder(Protocol):
    """Holds bytes of a budget until its work is done: a request."""

    @property
    def held_bytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """Waits for more while its ``holder`` holds some; ``limit`` ends the wait."""

    client: str
    holder: Holder
    limit: asyncio.Timeout


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
        # By client, and by whether the one who waits holds some already.
        self._lines = Lines()
        # Those who do, in the order in which they came.
        self._waiting: list[_Waiting] = []

    @property
    def used(self) -> int:
        return self._used

    @property
    def limit(self) -> int:
        return self._limit()

    def held(self, client: str) -> int:
        """What a named client has in use."""
        return self._held.get(client, 0)

    def held_here(self, client: str) -> int:
        """What a client, or all for "", has in use in this process."""
        return self._held.get(client, 0) if client else self._used

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
        """Take an amount for ``holder`` once it is admitted, behind what its client waits for already.

        A holder waits for one amount at a time. Those who hold some go before those who hold none, whose turn
        comes when they are done. Where several who wait for more hold all that their client holds, or all
        there is, none of them would ever go on: the last of them is refused at once, and gives back what it
        holds. Those that wait in other processes are not seen.

        Raises ``Overloaded`` then, and where the amount is not admitted within so many ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds) as limit:
                if not holder.held_bytes:
                    await self._lines.wait((client, False), lambda: self._take_behind(client, amount))
                    return
                waiting = _Waiting(client, holder, limit)
                self._waiting.append(waiting)
                try:
                    await self._lines.wait((client, True), lambda: self._take_or_untie(client, amount))
                finally:
                    self._waiting.remove(waiting)
        except TimeoutError:
            if not limit.expired():
                raise
            self.refused()
            raise self.overloaded(client, amount) from None

    def _take_behind(self, client: str, amount: int) -> None:
        """Take an amount where nobody of the client waits who holds some; raises ``Overloaded``."""
        if not self._lines.empty((client, True)) or not self.admits(client, amount):
            raise self.overloaded(client, amount)
        self.take(client, amount)

    def _take_or_untie(self, client: str, amount: int) -> None:
        """Take an amount; raises ``Overloaded``, and refuses one of those who wait for each other."""
        if self.admits(client, amount):
            self.take(client, amount)
            return
        self._untie(client)
        self._untie("")
        raise self.overloaded(client, amount)

    def _untie(self, client: str) -> None:
        """Refuse the last of those who wait, of a client or of all for "", where they hold all there is."""
        waiting = [entry for entry in self._waiting if not client or entry.client == client]
        if len(waiting) > 1 and sum([entry.holder.held_bytes for entry in waiting]) >= self.held_here(client):
            limit = waiting[-1].limit
            if not limit.expired():
                limit.reschedule(0)

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
