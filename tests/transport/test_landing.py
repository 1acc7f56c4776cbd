"""Memory of one process that another writes rows to: written as sent, used again, and never too early."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from tessera.errors import TransportUnavailable
from tessera.transport.landing import Landings, land

WIDTH = 256
ROWS = np.arange(5 * WIDTH, dtype="<f4").reshape(5, WIDTH)

WRITER = """
import sys
import msgspec, numpy as np
from tessera.transport.landing import land
from tessera.wire import SlabInfo
info = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SlabInfo)
land(info, np.arange(5 * 256, dtype="<f4").data.cast("B"))
assert "torch" not in sys.modules
"""


def data(rows: np.ndarray = ROWS) -> memoryview:
    return rows.reshape(-1).data.cast("B")


async def test_another_process_writes_what_is_read_here() -> None:
    landing = Landings("frontend", capacity=8 << 20).take(5, WIDTH)
    assert landing is not None
    info, command = msgspec.msgpack.encode(landing.info), [sys.executable, "-c", WRITER]
    await asyncio.to_thread(subprocess.run, command, input=info, check=True)
    assert np.array_equal(landing.rows(5), ROWS)


async def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    landings = Landings("frontend", capacity=8 << 20)
    landing = landings.take(5, WIDTH)
    assert landing is not None
    land(landing.info, data())
    rows = landing.rows(5)
    landing.close()
    last = rows[3:].reshape(-1).view(np.uint8).data
    del rows
    other = landings.take(5, WIDTH)
    assert other is not None and other.info.slab != landing.info.slab
    land(other.info, data(np.zeros_like(ROWS)))
    assert last == data(ROWS[3:])
    del last
    # Pages of about the size fit too.
    third = landings.take(7, WIDTH)
    assert third is not None and third.info.slab == landing.info.slab


async def test_what_may_still_be_written_to_is_never_used_again() -> None:
    before = len(os.listdir("/proc/self/fd"))
    landings = Landings("frontend", capacity=1 << 20)
    landing = landings.take(5, WIDTH)
    assert landing is not None and landings.take(5, WIDTH) is None
    landing.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(TransportUnavailable):
        land(landing.info, data())
    other = landings.take(5, WIDTH)
    assert other is not None and other.info.slab != landing.info.slab
    with pytest.raises(TransportUnavailable):
        # Whoever has its descriptor now has other memory.
        land(landing.info, data())
    other.untouched()
    again = landings.take(5, WIDTH)
    assert again is not None and again.info.slab == other.info.slab


async def test_memory_of_another_size_makes_room() -> None:
    landings = Landings("frontend", capacity=2 << 20)
    small, large = landings.take(5, WIDTH), landings.take(1500, WIDTH)
    assert small is not None and large is None
    small.untouched()
    assert landings.take(1500, WIDTH) is not None


async def test_memory_that_is_free_is_let_go_after_a_while() -> None:
    before = len(os.listdir("/proc/self/fd"))
    landings = Landings("frontend", capacity=8 << 20)
    taken = [landings.take(5, WIDTH) for _ in range(3)]
    for landing in taken[1:]:
        assert landing is not None
        landing.untouched()
    for _ in taken:
        landings.let_go()
    # Python's mapping has a descriptor of its own.
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert taken[0] is not None
    land(taken[0].info, data())
    assert np.array_equal(taken[0].rows(5), ROWS)
    landings.let_go()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    landing = Landings("frontend", capacity=8 << 20).take(1024, WIDTH)
    assert landing is not None
    with pytest.raises(TransportUnavailable, match="do not fit"):
        land(landing.info, data(np.zeros((1025, WIDTH), "<f4")))
