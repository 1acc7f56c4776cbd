"""Engines that a test holds and lets go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tessera.launched import Launched

WAIT = 60.0


@dataclass
class HeldEngine:
    """Answers each payload with its negative. Busy while ``gate`` is clear; raises for ``poison``.

    ``active`` holds the payloads that the engine may be reading or writing right now.
    """

    batches: list[list[int]] = field(default_factory=list)
    poison: set[int] = field(default_factory=set)
    active: set[int] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    work: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.gate.set()

    def launch(self, payloads: Sequence[int]) -> Launched[list[int]]:
        self.active |= set(payloads)
        self.batches.append(list(payloads))
        self.entered.release()
        try:
            assert self.gate.wait(WAIT)
            self.work()
            if self.poison & set(payloads):
                raise RuntimeError(f"cannot run {sorted(self.poison & set(payloads))}")
            return Launched.of([-payload for payload in payloads])
        finally:
            self.active -= set(payloads)


class AsyncBatch:
    """A launched batch that ends when the test says so."""

    def __init__(self, payloads: Sequence[int], poison: set[int]) -> None:
        self.payloads = list(payloads)
        self.finish = threading.Event()
        self.calls: list[Callable[[], None]] = []
        self._poison = poison

    def done(self) -> bool:
        return self.finish.is_set()

    def result(self) -> list[int]:
        assert self.finish.wait(WAIT)
        if self._poison & set(self.payloads):
            raise RuntimeError("a late failure")
        return [-payload for payload in self.payloads]

    def end(self) -> None:
        """Be done, and tell."""
        self.finish.set()
        for call in self.calls:
            call()


@dataclass
class AsyncEngine:
    """Returns from ``launch`` at once: as a GPU engine does, or telling when it is done."""

    launched: list[AsyncBatch] = field(default_factory=list)
    poison: set[int] = field(default_factory=set)
    automatic: bool = False
    telling: bool = False

    def launch(self, payloads: Sequence[int]) -> Launched[list[int]]:
        batch = AsyncBatch(payloads, self.poison)
        if self.automatic:
            batch.finish.set()
        self.launched.append(batch)
        return Launched(batch.result, done=batch.done, tell=batch.calls.append if self.telling else None)
