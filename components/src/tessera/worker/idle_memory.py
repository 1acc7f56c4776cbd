"""Gives memory back to the system when a worker has nothing to do."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from typing import Final

from tessera.tasks import KEEPER

log = logging.getLogger(__name__)

_EVERY_SECONDS: Final = 5.0
# The share of one core: health checks and scrapes take less, and any work takes more.
_IDLE_SHARE: Final = 0.1


def give_back_when_idle(every: float = _EVERY_SECONDS) -> asyncio.Task[None] | None:
    """Return free memory to the system once in each idle time that follows work, until the task is cancelled.

    glibc keeps much of what is freed, above all by several threads: after a burst of images a worker held
    four times what it used, for as long as it ran. A request that comes just then waits for a few
    milliseconds. Looks every ``every`` seconds. None where the C library cannot trim.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is None:
        return None
    worked = True
    before = time.process_time()

    async def look() -> None:
        nonlocal worked, before
        await asyncio.sleep(every)
        now = time.process_time()
        idle = now - before < _IDLE_SHARE * every
        before = now
        if idle and worked:
            started = time.perf_counter()
            await asyncio.to_thread(trim, ctypes.c_size_t(0))
            log.debug("gave free memory back in %.1f ms", (time.perf_counter() - started) * 1e3)
        worked = not idle

    return KEEPER.start("memory", look)
