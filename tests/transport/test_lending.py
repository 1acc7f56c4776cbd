"""Memory lent by a process without a slab: to readers as an encode worker's is, and to writers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from tessera.errors import LeaseExpired, TransportUnavailable
from tessera.transport.kinds.shm import ShmTransport
from tessera.transport.lending import Lender, Loan, inline_handle, land
from tessera.wire import Handle

ROWS = np.arange(12, dtype="<f4").reshape(3, 4)
NBYTES = ROWS.nbytes
STEP = 1 << 20

WRITER = """
import sys
import msgspec, numpy as np
from tessera.transport.lending import land
from tessera.wire import SlabInfo
info = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SlabInfo)
land(info, np.arange(12, dtype="<f4").data.cast("B"))
assert "torch" not in sys.modules
"""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def lend(lender: Lender) -> Loan | None:
    return lender.take(ROWS.shape, "float32")


def lease(loan: Loan) -> Handle:
    return loan.lease(inline_handle(ROWS.tobytes(), shape=ROWS.shape, dtype="float32"))


def landing(lender: Lender, nbytes: int = NBYTES) -> Loan:
    loan = lender.landing(nbytes)
    assert loan is not None
    return loan


def on_cpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


async def test_what_is_lent_is_read_and_acknowledged() -> None:
    before = descriptors()
    lender, reader = Lender("frontend", capacity=100), ShmTransport("worker")
    loan = lend(lender)
    assert loan is not None
    handle = lease(loan)
    assert (lender.lent, handle.data) == (48, b"")
    slab = reader.connect(loan.info)
    rows = await slab.fetch(handle, on_cpu)
    assert rows.tolist() == ROWS.tolist()
    assert await slab.release(handle)
    slab.close()
    loan.close()
    assert (lender.lent, descriptors()) == (0, before)


async def test_what_was_taken_back_is_not_believed() -> None:
    lender, reader = Lender("frontend", capacity=100), ShmTransport("worker")
    loan = lend(lender)
    assert loan is not None
    handle = lease(loan)
    slab = reader.connect(loan.info)
    await slab.fetch(handle, on_cpu)
    loan.close()
    assert not await slab.release(handle)
    with pytest.raises(LeaseExpired):
        await slab.fetch(handle, on_cpu)
    slab.close()
    slab.close()
    with pytest.raises(TransportUnavailable):
        await slab.fetch(handle, on_cpu)
    # The lender is gone: nobody maps its memory any more.
    with pytest.raises(TransportUnavailable):
        reader.connect(loan.info)


def test_no_more_is_lent_than_there_is_room_for() -> None:
    lender = Lender("frontend", capacity=100)
    loans = [lend(lender), lend(lender)]
    assert all(loans)
    assert lend(lender) is None
    assert loans[0] is not None
    loans[0].close()
    for loan in (loans[1], lend(lender)):
        assert loan is not None
        loan.close()
    assert lender.lent == 0


async def test_another_process_writes_what_is_read_here() -> None:
    loan = landing(Lender("frontend", capacity=STEP))
    info, command = msgspec.msgpack.encode(loan.info), [sys.executable, "-c", WRITER]
    await asyncio.to_thread(subprocess.run, command, input=info, check=True)
    assert loan.landed(NBYTES) == ROWS.tobytes()


async def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    lender = Lender("frontend", capacity=2 * STEP)
    loan = landing(lender)
    land(loan.info, memoryview(ROWS.tobytes()))
    rows = np.frombuffer(loan.landed(NBYTES), "<f4")
    loan.close()
    assert not rows.flags.writeable
    last = rows[6:].view(np.uint8).data
    del rows
    other = landing(lender)
    assert other.info.slab != loan.info.slab
    land(other.info, memoryview(bytes(NBYTES)))
    assert last == ROWS.tobytes()[24:] and lender.lent == 2 * STEP
    del last
    assert lender.lent == STEP
    # Replies of about the size fit too.
    assert landing(lender, 5 * NBYTES).info.slab == loan.info.slab


async def test_what_may_still_be_written_to_is_never_used_again() -> None:
    before = descriptors()
    lender = Lender("frontend", capacity=STEP)
    loan = landing(lender)
    assert lender.landing(NBYTES) is None
    loan.close()
    assert descriptors() == before
    with pytest.raises(TransportUnavailable):
        land(loan.info, memoryview(bytes(NBYTES)))
    other = landing(lender)
    assert other.info.slab != loan.info.slab
    with pytest.raises(TransportUnavailable):
        # Whoever has its descriptor now has other memory.
        land(loan.info, memoryview(bytes(NBYTES)))


async def test_free_memory_of_another_size_makes_room() -> None:
    lender = Lender("frontend", capacity=2 * STEP)
    small = landing(lender)
    assert lender.landing(STEP + 1) is None
    small.landed(NBYTES).release()
    landing(lender, STEP + 1)


async def test_memory_that_is_free_is_let_go_after_a_while() -> None:
    before = descriptors()
    lender = Lender("frontend", capacity=3 * STEP)
    kept, *others = [landing(lender) for _ in range(3)]
    for loan in others:
        loan.landed(NBYTES).release()
    for _ in range(3):
        lender.let_go()
    # Python's mapping has a descriptor of its own.
    assert descriptors() == before + 2
    land(kept.info, memoryview(ROWS.tobytes()))
    assert kept.landed(NBYTES) == ROWS.tobytes()
    lender.let_go()
    assert descriptors() == before


async def test_more_than_there_is_memory_for_is_not_written() -> None:
    loan = landing(Lender("frontend", capacity=STEP), STEP)
    with pytest.raises(TransportUnavailable, match="do not fit"):
        land(loan.info, memoryview(bytes(STEP + 1)))


def test_a_frontend_has_no_torch() -> None:
    code = "import sys, tessera.frontend.__main__; sys.exit(any(n in sys.modules for n in ('torch', 'nixl')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=180).returncode == 0
