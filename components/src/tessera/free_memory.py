"""Gives memory that nobody uses back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
# Growth that only work makes: where others have the cores, work may get less of one than health checks take.
_GROWTH_BYTES: Final = 16 << 20


def give_back_free_memory(every: float = _EVERY_SECONDS) -> asyncio.Task[None] | None:
    """Return free memory to the system until the task is cancelled.

    glibc keeps much of what is freed, above all by several threads: after a burst of images a worker held
    four times what it used, for as long as it ran. It is returned once in each idle time that follows work or
    growth, and once more behind growth. Under load it is when the process has grown by 256 MiB, or by a
    quarter if that is more, since the last time. A request that comes just then waits for a few milliseconds.
    Looks every ``every`` seconds. None where the C library cannot trim.
    """
    if _trimmer() is None:
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
        growth = nbytes - kept
        worked = worked or growth > _GROWTH_BYTES
        if (idle and worked) or growth > max(_MOST_GROWTH_BYTES, _MOST_GROWTH_SHARE * kept):
            started = time.perf_counter()
            await trim()
            kept = resident_bytes()
            took = (time.perf_counter() - started) * 1e3
            log.debug("gave %d of %d MiB back in %.1f ms", (nbytes - kept) >> 20, nbytes >> 20, took)
        # What has grown may be in use still, and is looked at again.
        worked = not idle or growth > _GROWTH_BYTES

    return KEEPER.start("memory", look)


async def trim() -> None:
    """Return free memory to the system now. A no-op where the C library cannot."""
    if (call := _trimmer()) is not None:
        await asyncio.to_thread(call, ctypes.c_size_t(0))


def _trimmer() -> Callable[[ctypes.c_size_t], object] | None:
    """glibc alone has it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


# Of mallopt(3).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_ARENAS: Final = 4
# The most that glibc takes.
_HEAP_BLOCK_BYTES: Final = 32 << 20
# More than ``give_back_free_memory`` leaves.
_FREE_BYTES: Final = 1 << 30


def share_heaps() -> None:
    """Let threads that begin from now on share a few heaps, which keep what is freed until it is given back.

    glibc makes eight for each core, of 64 MiB and more, which keep what was freed in them. By itself it
    gives back the end of a heap, and blocks outside of heaps, in the turn in which they are freed. Then a
    message of 32 MiB took 8,200 new pages, 10 ms of the event loop, and 60 on a busy machine. A no-op where
    the C library has no heaps.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_M_ARENA_MAX, _ARENAS)
        choose(_M_TRIM_THRESHOLD, _FREE_BYTES)
        choose(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES)


# Less is freed sooner than a thread is woken: 60 MB take 6 ms, and more on a machine that is busy.
_LARGE_BYTES: Final = 1 << 20
# One, so that a loop waits for the interpreter behind one piece of work at most.
_FREEING: Final = ThreadPoolExecutor(1, "free")


def free_aside(free: Callable[[], object], nbytes: int) -> None:
    """Call what frees about so many bytes, on a thread where they are many.

    Clients that leave together, or are refused together, let go of a body each in one turn of the event loop:
    300 MB took it 127 ms, 126 of them in the system.
    """
    if nbytes > _LARGE_BYTES:
        # The interpreter may be ending.
        with suppress(RuntimeError):
            _FREEING.submit(free)
            return
    free()


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * resource.getpagesize()
