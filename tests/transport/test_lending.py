"""Rows lent by a process without a slab: the same checks and leases as an encode worker's."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tessera.errors import LeaseExpired, TransportUnavailable
from tessera.transport.kinds.shm import ShmTransport
from tessera.transport.lending import Lender, inline_handle
from tessera.wire import Handle

ROWS = np.arange(12, dtype="<f4").reshape(3, 4)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def handle() -> Handle:
    return inline_handle(ROWS.tobytes(), shape=(3, 4), dtype="float32")


def on_cpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


async def test_a_loan_is_read_and_acknowledged() -> None:
    before = descriptors()
    lender, reader = Lender("frontend", capacity=100), ShmTransport("worker")
    loan = lender.lend(handle())
    assert loan is not None
    assert (lender.lent, loan.handle.data, loan.acknowledged) == (48, b"", False)
    slab = reader.connect(loan.info)
    rows = await slab.fetch(loan.handle, on_cpu)
    assert rows.tolist() == ROWS.tolist()
    assert await slab.release(loan.handle)
    assert loan.acknowledged
    slab.close()
    loan.close()
    assert (lender.lent, descriptors()) == (0, before)


async def test_what_was_taken_back_is_not_believed() -> None:
    lender, reader = Lender("frontend", capacity=100), ShmTransport("worker")
    loan = lender.lend(handle())
    assert loan is not None
    slab = reader.connect(loan.info)
    await slab.fetch(loan.handle, on_cpu)
    loan.close()
    assert not await slab.release(loan.handle)
    with pytest.raises(LeaseExpired):
        await slab.fetch(loan.handle, on_cpu)
    slab.close()
    slab.close()
    with pytest.raises(TransportUnavailable):
        await slab.fetch(loan.handle, on_cpu)
    # The lender is gone: nobody maps its memory any more.
    with pytest.raises(TransportUnavailable):
        reader.connect(loan.info)


def test_no_more_is_lent_than_there_is_room_for() -> None:
    lender = Lender("frontend", capacity=100)
    loans = [lender.lend(handle()), lender.lend(handle())]
    assert all(loans)
    assert lender.lend(handle()) is None
    assert loans[0] is not None
    loans[0].close()
    third = lender.lend(handle())
    assert third is not None
    for loan in (loans[1], third):
        assert loan is not None
        loan.close()
    assert lender.lent == 0


def test_a_frontend_has_no_torch() -> None:
    code = "import sys, tessera.frontend.__main__; sys.exit(any(n in sys.modules for n in ('torch', 'nixl')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
