from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tests.waiting import until

from tessera.errors import HandOffError, Overloaded
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.slab import Slab

GEOMETRY = Geometry(capacity_rows=40, block_rows=10, row_width=4, dtype="float32")


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab(GEOMETRY, lease_seconds=0.1)
    yield made
    made.close()


async def test_slots_are_views_of_whole_units(slab: Slab) -> None:
    first = await slab.acquire(11, timeout=1)
    second = await slab.acquire(1, timeout=1)
    assert (first.block, first.shape, first.rows.nbytes) == (0, (11, 4), 11 * 16)
    assert (second.block, second.shape) == (2, (1, 4))
    assert second.rows.data_ptr() == slab.rows.data_ptr() + 20 * 16
    assert slab.stats().used_bytes == 30 * 16
    assert slab.stats().held == 2


async def test_leases_are_never_reused_and_start_anywhere() -> None:
    seen: set[int] = set()
    for _ in range(3):
        slab = Slab(GEOMETRY, lease_seconds=30)
        for _ in range(20):
            slot = await slab.acquire(10, timeout=1)
            assert 0 < slot.lease < 2**63
            assert slot.lease not in seen
            seen.add(slot.lease)
            slot.free()
        slab.close()


async def test_freeing_twice_and_publishing_twice(slab: Slab) -> None:
    slot = await slab.acquire(40, timeout=1)
    slot.free()
    other = await slab.acquire(40, timeout=1)
    slot.free()
    assert slab.stats().used_bytes == 40 * 16
    with pytest.raises(HandOffError, match="free"):
        slab.lease(slot, "shm", "encoder-1")
    slab.lease(other, "shm", "encoder-1")
    other.free()
    assert slab.stats().leased == 1
    with pytest.raises(HandOffError, match="leased"):
        slab.lease(other, "shm", "encoder-1")


async def test_the_lease_word_stands_while_the_lease_does(slab: Slab) -> None:
    slot = await slab.acquire(25, timeout=1)
    assert list(slab.memory.lease) == [0, 0, 0, 0]
    slab.lease(slot, "shm", "encoder-1")
    assert list(slab.memory.lease) == [slot.lease, 0, 0, 0]
    assert slab.release(slot.lease) is True
    assert list(slab.memory.lease) == [0, 0, 0, 0]
    assert slab.release(slot.lease) is False


async def test_the_word_is_cleared_before_the_memory_can_be_taken(slab: Slab) -> None:
    slot = await slab.acquire(40, timeout=1)
    slab.lease(slot, "shm", "encoder-1")
    words: list[int] = []

    async def next_user() -> None:
        await slab.acquire(40, timeout=1)
        words.extend(slab.memory.lease)

    waiting = asyncio.ensure_future(next_user())
    await asyncio.sleep(0)
    slab.release(slot.lease)
    await waiting
    assert words == [0, 0, 0, 0]


async def test_an_acknowledged_slot_is_swept(slab: Slab) -> None:
    slot = await slab.acquire(10, timeout=1)
    slab.lease(slot, "shm", "encoder-1")
    slab.memory.ack[slot.block] = slot.lease - 1
    assert slab.sweep() == 0
    slab.memory.ack[slot.block] = slot.lease
    assert slab.sweep() == 1
    assert (slab.stats().released, slab.stats().expired) == (1, 0)


async def test_an_expired_slot_is_swept_by_itself(slab: Slab) -> None:
    slot = await slab.acquire(40, timeout=1)
    slab.lease(slot, "shm", "encoder-1")
    again = await slab.acquire(1, timeout=5)
    assert again.block == 0
    stats = slab.stats()
    assert (stats.released, stats.expired, stats.waits) == (0, 1, 1)


async def test_the_timer_runs_only_while_something_is_leased(slab: Slab) -> None:
    slot = await slab.acquire(10, timeout=1)
    assert slab._timer is None
    slab.lease(slot, "shm", "encoder-1")
    assert slab._timer is not None
    slab.memory.ack[slot.block] = slot.lease
    await until(lambda: slab._timer is None)
    assert slab.stats().leased == 0


async def test_the_timer_goes_on_after_an_error(slab: Slab) -> None:
    sweep, failed = slab.sweep, []

    def odd() -> None:
        slab.sweep = sweep  # type: ignore[method-assign]
        raise RuntimeError("odd")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    slot = await slab.acquire(10, timeout=1)
    slab.sweep = odd  # type: ignore[method-assign]
    slab.lease(slot, "shm", "encoder-1")
    slab.memory.ack[slot.block] = slot.lease
    await until(lambda: slab._timer is None)
    assert len(failed) == 1 and slab._leased == {}


async def test_a_waiter_hurries_the_sweep() -> None:
    slab = Slab(GEOMETRY, lease_seconds=60)
    slot = await slab.acquire(40, timeout=1)
    slab.lease(slot, "shm", "encoder-1")
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(slab.acquire(10, timeout=5))
    await asyncio.sleep(0)
    assert slab._timer is not None and slab._timer.when() - loop.time() < 0.05
    slab.memory.ack[slot.block] = slot.lease
    await waiting
    slab.close()


async def test_requests_that_cannot_be_met(slab: Slab) -> None:
    with pytest.raises(HandOffError, match="41 rows can never fit a slab of 40"):
        await slab.acquire(41, timeout=60)
    with pytest.raises(ValueError, match="at least one row"):
        await slab.acquire(0, timeout=1)
    await slab.acquire(40, timeout=1)
    with pytest.raises(Overloaded):
        await slab.acquire(1, timeout=0.01)


async def test_draining_waits_for_readers(slab: Slab) -> None:
    slab.lease_seconds = 60
    slot = await slab.acquire(10, timeout=1)
    slab.lease(slot, "shm", "encoder-1")
    assert await slab.drain(timeout=0.01) is False
    asyncio.get_running_loop().call_later(0.02, slab.memory.ack.__setitem__, slot.block, slot.lease)
    assert await slab.drain(timeout=60) is True


async def test_a_closed_slab_ends_waits_and_keeps_views_alive(slab: Slab) -> None:
    slot = await slab.acquire(40, timeout=1)
    waiting = asyncio.ensure_future(slab.acquire(1, timeout=60))
    await asyncio.sleep(0)
    slab.close()
    slab.close()
    with pytest.raises(HandOffError, match="closed"):
        await waiting
    slot.rows.fill_(1)
    slot.free()
    assert torch.equal(slot.rows, torch.ones(40, 4))
