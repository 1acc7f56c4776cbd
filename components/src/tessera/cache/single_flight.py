"""Concurrent calls for one key share one computation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Runs one task for each key at a time.

    The task belongs to no caller: the first one may be cancelled without stranding those that joined, and one
    that joined may be cancelled without harming the rest. When the last one is gone the task is cancelled.
    """

    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight[T]] = {}
        self.joined = 0

    async def run(self, key: bytes, compute: Callable[[], Awaitable[T]]) -> T:
        """The result of ``compute`` for the key, of this call or of one under way; all raise its error."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(compute()))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        else:
            self.joined += 1
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                # Forgotten now, not when the cancellation has come through: a caller that arrives in
                # between must start anew instead of joining a task that is about to die.
                self._forget(key, flight)
                flight.task.cancel()

    def _forget(self, key: bytes, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            # With every waiter gone nothing else retrieves the error, and asyncio would complain.
            flight.task.exception()
