"""Memory that nobody uses goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading

import pytest

from tessera.free_memory import free_aside
from tests.waiting import until

pytestmark = pytest.mark.starts

# Blocks that the C library takes from its heap, not from the system one by one; what lies above the others
# keeps the heap from shrinking by itself.
PROGRAM = """
import asyncio, ctypes, sys, time
from tessera.free_memory import give_back_free_memory, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
busy, little, count = sys.argv[1] == "busy", sys.argv[1] == "little", int(sys.argv[2])
every = 1.5 if little else 0.2

def allocate() -> list[int]:
    blocks = [libc.malloc(100_000) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    return blocks

async def main() -> tuple[int, int, int]:
    giving_back = give_back_free_memory(every)
    # Behind the first look, which takes the start of a process for work.
    await asyncio.sleep(every * 1.3 if little else 0.1)
    blocks = allocate()
    full = resident_bytes()
    for block in blocks[:-1]:
        libc.free(block)
    freed = resident_bytes()
    until = time.monotonic() + 60
    while time.monotonic() < until and resident_bytes() > freed - (160 << 20):
        if busy:
            sum(range(100_000))
        await asyncio.sleep(0 if busy else 0.1)
    giving_back.cancel()
    return full, freed, resident_bytes()

print(*asyncio.run(main()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(("load", "blocks"), [("idle", 2000), ("busy", 4000), ("little", 2000)])
def test_a_worker_keeps_no_free_memory(load: str, blocks: int) -> None:
    """One that has nothing to do none at all, one that works none by which it has grown much.

    What grows has worked, however little of a processor it got.
    """
    words = [sys.executable, "-c", PROGRAM, load, str(blocks)]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, timeout=180)
    full, freed, after = (int(nbytes) >> 20 for nbytes in ran.stdout.split())
    # Freeing alone gave nothing back: otherwise this would prove nothing.
    assert full - freed < 20
    assert freed - after > 150


async def test_large_blocks_are_freed_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []
    free_aside(lambda: threads.append(threading.current_thread()), 1 << 10)
    assert threads == [threading.current_thread()]
    free_aside(lambda: threads.append(threading.current_thread()), 2 << 20)
    await until(lambda: len(threads) == 2)
    assert threads[1] is not threading.current_thread()


# Threads that allocate at once, and what the C library then says of its heaps.
THREADS = """
import ctypes, sys, threading
from tessera.free_memory import share_heaps

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_heaps()
together = threading.Barrier(16)

def allocate() -> None:
    together.wait()
    libc.malloc(ctypes.c_size_t(1000))
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_threads_share_a_few_heaps() -> None:
    def heaps(*words: str) -> int:
        command = [sys.executable, "-c", THREADS, *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
        return ran.stdout.count("<heap nr=")

    assert heaps("shared") <= 4 < heaps("own")
