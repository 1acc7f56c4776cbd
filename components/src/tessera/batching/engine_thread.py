"""The thread that keeps one engine busy: whole batches from a ``Slot``, results to the event loop."""

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

from tessera.batching.open_batch import Slot
from tessera.batching.queue import Entry, P, R, requests_of
from tessera.errors import EngineDead, EngineFailed, TesseraError

log = logging.getLogger(__name__)

R_co = TypeVar("R_co", covariant=True)

# How long the thread looks for a next batch before it looks at the launched ones again.
_PEEK_SECONDS = 0.0002


class Running(Protocol[R_co]):
    """A launched batch; ``result`` gives one value for each entry, in order."""

    def done(self) -> bool: ...

    def result(self) -> Sequence[R_co]: ...


Launch = Callable[[Sequence[P]], Running[R]]


class Owner(Protocol[P, R]):
    """Whom the thread tells, on the event loop, in the order in which things happened."""

    def taken(self, alive: list[Entry[P, R]], dead: list[Entry[P, R]], at: float) -> None:
        """A batch left the slot; what is dead was cancelled and is not run."""

    def deliver(
        self, entries: list[Entry[P, R]], values: Sequence[R], started: float, ended: float
    ) -> None: ...

    def broke(self, entries: list[Entry[P, R]], error: Exception, started: float, ended: float) -> None:
        """A batch raised; some of it may still be run by halves."""

    def fail(self, entries: list[Entry[P, R]], error: TesseraError) -> None: ...

    def forsake(self, entries: list[Entry[P, R]]) -> None:
        """Cancelled entries of a batch that failed; they will not run again."""

    def died(self, error: EngineDead) -> None: ...


@dataclass(slots=True)
class _InFlight(Generic[P, R]):
    entries: list[Entry[P, R]]
    running: Running[R]
    started: float


class EngineThread(Generic[P, R]):
    """Launches batches from ``slot``, ``depth`` at a time, until the slot is closed and empty.

    A batch that fails is halved until the entries at fault stand alone. Once the engine has raised
    ``EngineDead`` (kept in ``dead``) nothing is launched any more and everything fails with it.
    """

    def __init__(
        self, name: str, launch: Launch[P, R], slot: Slot[P, R], *, depth: int, owner: Owner[P, R]
    ) -> None:
        self.dead: EngineDead | None = None
        self._name = name
        self._launch = launch
        self._slot = slot
        self._depth = depth
        self._owner = owner
        self._post = asyncio.get_running_loop().call_soon_threadsafe
        self._running_since = math.inf
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def running_seconds(self) -> float:
        """How long the oldest batch has been in the engine; 0 when none is."""
        return max(0.0, time.perf_counter() - self._running_since)

    def join(self) -> None:
        self._thread.join()

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
                self._post(self._owner.taken, alive, dead, time.perf_counter())
                if alive:
                    self._start(alive, launched)
            if launched and (full or launched[0].running.done() or taken is None):
                self._finish(launched.popleft())

    def _start(self, entries: list[Entry[P, R]], launched: deque[_InFlight[P, R]]) -> None:
        started = time.perf_counter()
        if not launched:
            self._running_since = started
        try:
            if self.dead is not None:
                raise EngineDead(self.dead.message)
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
                    f"the {self._name} engine gave {len(values)} results for {len(batch.entries)} entries"
                )
        except Exception as error:
            self._failed(batch.entries, error, batch.started)
            return
        self._post(self._owner.deliver, batch.entries, values, batch.started, time.perf_counter())

    def _failed(self, entries: list[Entry[P, R]], error: Exception, started: float) -> None:
        self._post(self._owner.broke, entries, error, started, time.perf_counter())
        if isinstance(error, EngineDead):
            if self.dead is None:
                self.dead = error
                log.critical("%s engine: %s", self._name, error)
                self._post(self._owner.died, error)
            self._post(self._owner.fail, entries, error)
        elif len(entries) == 1:
            self._post(self._owner.fail, entries, self._failure(entries, error))
        else:
            self._halve(entries, error)

    def _failure(self, entries: list[Entry[P, R]], error: Exception) -> TesseraError:
        if isinstance(error, TesseraError):
            return error
        log.error("%s engine: %s: %s", self._name, type(error).__name__, error, extra=requests_of(entries))
        return EngineFailed(f"the {self._name} engine failed: {error}")

    def _halve(self, entries: list[Entry[P, R]], error: Exception) -> None:
        """One entry must not fail the batch it rode in: halve until it stands alone."""
        log.warning(
            "%s engine: a batch of %d failed (%s); trying halves",
            *(self._name, len(entries), error),
            extra=requests_of(entries),
        )
        middle = len(entries) // 2
        for half in (entries[:middle], entries[middle:]):
            alive, dead = _part(half)
            if dead:
                self._post(self._owner.forsake, dead)
            launched: deque[_InFlight[P, R]] = deque()
            if alive:
                self._start(alive, launched)
            if launched:
                self._finish(launched.popleft())


def _part(entries: list[Entry[P, R]]) -> tuple[list[Entry[P, R]], list[Entry[P, R]]]:
    # Each flag is read once: the event loop may set it at any moment, and an entry is either run or not.
    alive: list[Entry[P, R]] = []
    dead: list[Entry[P, R]] = []
    for entry in entries:
        (dead if entry.dropped else alive).append(entry)
    return alive, dead
