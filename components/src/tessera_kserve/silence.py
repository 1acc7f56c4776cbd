"""Ends streams that say nothing, when the process grows meanwhile."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tessera.free_memory import resident_bytes, trim
from tessera.tasks import KEEPER

log = logging.getLogger("tessera.frontend.kserve.silence")

MOST_GROWTH_BYTES: Final = 320 << 20
"""What a process may grow by while streams are silent."""

_LOOK_SECONDS: Final = 0.05
# gRPC frees what a stream has taken when its call has ended.
_FREED_SECONDS: Final = 0.2
# Growth that stays when a client's streams are gone is not theirs.
_FREED_BYTES: Final = 16 << 20


class Silence:
    """Those streams that wait for a message. Owned by one event loop.

    Any of them may have sent a part of one and never end it, and gRPC does not tell. Most say nothing and
    hold nothing, and may be as many as calls may be open. So it is the process that is looked at: when it
    has grown, the streams of the client that has most of them are ended, and so on until it has not.
    """

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        """``held_bytes`` gives those of messages and bodies that are whole, which are counted elsewhere."""
        self._held_bytes = held_bytes
        # By stream, its client.
        self._silent: dict[asyncio.Timeout, str] = {}
        self._several = asyncio.Event()
        self._lowest = 0

    def watch(self) -> asyncio.Task[None]:
        """Look at the process until the task is cancelled, as long as several streams are silent."""
        return KEEPER.start("silent streams", self._look)

    @contextmanager
    def of(self, client: str, clock: asyncio.Timeout) -> Iterator[None]:
        """Count a stream of a client, whose ``clock`` is over when it has to end."""
        self._silent[clock] = client
        if len(self._silent) > 1 and not self._several.is_set():
            self._lowest = self._unaccounted()
            self._several.set()
        try:
            yield
        finally:
            self._silent.pop(clock, None)
            if len(self._silent) <= 1:
                self._several.clear()

    async def _look(self) -> None:
        await self._several.wait()
        await asyncio.sleep(_LOOK_SECONDS)
        nbytes = self._unaccounted()
        self._lowest = min(self._lowest, nbytes)
        if nbytes - self._lowest <= MOST_GROWTH_BYTES:
            return
        # Much of it may be free.
        await trim()
        grown = self._unaccounted() - self._lowest
        if grown <= MOST_GROWTH_BYTES or not self._silent:
            return
        ((client, count),) = Counter(self._silent.values()).most_common(1)
        for clock in [clock for clock, whose in self._silent.items() if whose == client]:
            del self._silent[clock]
            clock.reschedule(-math.inf)
        await asyncio.sleep(_FREED_SECONDS)
        await trim()
        left = self._unaccounted() - self._lowest
        log.warning("ended %d silent streams of gRPC: %d MiB, %d before", count, left >> 20, grown >> 20)
        if left > grown - _FREED_BYTES:
            self._lowest += left

    def _unaccounted(self) -> int:
        # What is whole is there twice for a moment.
        return resident_bytes() - 2 * self._held_bytes()
