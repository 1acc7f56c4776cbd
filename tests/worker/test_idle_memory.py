"""Memory that nobody uses goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Blocks that the C library takes from its heap, not from the system one by one; what lies above the others
# keeps the heap from shrinking by itself.
PROGRAM = """
import asyncio, ctypes, sys
from pathlib import Path
from tessera.worker.idle_memory import give_back_when_idle

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

blocks = [libc.malloc(100_000) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
full = resident()
for block in blocks[:-1]:
    libc.free(block)
freed = resident()

async def idle() -> None:
    giving_back = give_back_when_idle(every=0.2)
    await asyncio.sleep(3)
    giving_back.cancel()

asyncio.run(idle())
print(full, freed, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_worker_that_has_nothing_to_do_keeps_no_free_memory() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    full, freed, after = map(int, ran.stdout.split())
    # Freeing alone gave nothing back: otherwise this would prove nothing.
    assert full - freed < 20
    assert freed - after > 150
