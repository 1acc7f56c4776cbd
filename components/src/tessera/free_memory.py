"""Gives memory that nobody uses back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import resource
import time
from pathlib import Path
from typing import Final

from tessera.tasks import KEEPER

log = logging.getLogger(__name__)

_EVERY_SECONDS: Final = 5.0
# The share of one core: health checks and scrapes take less, and any work takes more.
_IDLE_SHARE: Final = 0.1
# What a process may grow by under load before its free memory is given back: 20 minutes of new images and of
# clients that hang up took a worker of 390 MB to 1,034 MB, of which 640 were free.
_MOST_GROWTH_BYTES: Final = 256 << 20
_MOST_GROWTH_SHARE: Final = 0.25


def give_back_free_memory(every: float = _EVERY_SECONDS) -> asyncio.Task[None] | None:
    """Return free memory to the system until the task is cancelled.

    glibc keeps much of what is freed, above all by several threads: after a burst of images a worker held
    four times what it used, for as long as it ran. It is returned once in each idle time that follows work,
    and under load when the process has grown by 256 MiB, or by a quarter if that is more, since the last
    time. A request that comes just then waits for a few milliseconds. Looks every ``every`` seconds. None
    where the C library cannot trim.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is None:
        return None
    worked = True
    before = time.process_time()
    kept = resident_bytes()

    async def look() -> None:
        nonlocal worked, before, kept
        await asyncio.sleep(every)
        now, nbytes = time.process_time(), resident_bytes()
        idle = now - before < _IDLE_SHARE * every
        before = now
        # Memory may shrink by itself, and growth counts from there.
        kept = min(kept, nbytes)
        if (idle and worked) or nbytes - kept > max(_MOST_GROWTH_BYTES, _MOST_GROWTH_SHARE * kept):
            started = time.perf_counter()
            await asyncio.to_thread(trim, ctypes.c_size_t(0))
            kept = resident_bytes()
            took = (time.perf_counter() - started) * 1e3
            log.debug("gave %d of %d MiB back in %.1f ms", (nbytes - kept) >> 20, nbytes >> 20, took)
        worked = not idle

    return KEEPER.start("memory", look)


# Of mallopt(3).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8
_ARENAS: Final = 4
# A body of the usual limit and its copy.
_KEPT_BYTES: Final = 128 << 20


def set_heaps() -> None:
    """Let threads that begin from now on share a few heaps, and large blocks be taken from these.

    glibc makes eight heaps for each core, of 64 MiB and more, which keep what was freed in them. And it maps
    each block of 32 MiB or more anew: gRPC's joining of a message of 60 MiB, which the event loop waits for,
    took 147 ms of processor time, most of it for the first touch of 45,000 pages. In a heap it takes 35. A
    heap keeps 128 MiB at its end until free memory is given back. A no-op where the C library has no heaps.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_M_ARENA_MAX, _ARENAS)
        choose(_M_MMAP_MAX, 0)
        choose(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * resource.getpagesize()
