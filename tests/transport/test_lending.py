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


async def test_a_loan_is_read_and_acknowledged() -> None:
    before = descriptors()
    lender, reader = Lender("frontend", capacity=100), ShmTransport("worker")
    loan = lender.lend(handle())
    assert loan is not None
    assert (lender.lent, loan.handle.data, loan.acknowledged) == (48, b"", False)
    reader.connect(loan.info)
    into = torch.empty(3, 4)
    await reader.fetch(loan.handle, into)
    assert into.tolist() == ROWS.tolist()
    assert await reader.release(loan.handle)
    assert loan.acknowledged
    reader.disconnect(loan.handle.slab)
    loan.close()
    assert (lender.lent, descriptors()) == (0, before)


async def test_what_was_taken_back_is_not_believed() -> None:
    lender, reader = Lender("frontend", capacity=100), ShmTransport("worker")
    loan = lender.lend(handle())
    assert loan is not None
    reader.connect(loan.info)
    into = torch.empty(3, 4)
    await reader.fetch(loan.handle, into)
    loan.close()
    assert not await reader.release(loan.handle)
    with pytest.raises(LeaseExpired):
        await reader.fetch(loan.handle, into)
    reader.close()
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
