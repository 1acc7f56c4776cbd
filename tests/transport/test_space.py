from __future__ import annotations

import asyncio

import pytest

from tessera.errors import HandOffError, Overloaded
from tessera.transport.slab.space import SharedRange, Space


async def test_waiters_are_served_in_the_order_in_which_they_came() -> None:
    space = Space(4, name="slab")
    start = await space.take(4, timeout=1)
    order: list[str] = []

    async def take(name: str, blocks: int) -> int:
        got = await space.take(blocks, timeout=1)
        order.append(name)
        return got

    large = asyncio.ensure_future(take("large", 4))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(take("small", 1))
    await asyncio.sleep(0)
    space.give(start, 4)
    assert await large == 0
    # The small one fits no earlier than the large one has left.
    assert order == ["large"]
    assert not small.done()
    space.give(0, 4)
    assert await small == 0
    assert space.waits == 2


async def test_a_newcomer_does_not_overtake() -> None:
    space = Space(4, name="slab")
    await space.take(3, timeout=1)
    waiting = asyncio.ensure_future(space.take(2, timeout=1))
    await asyncio.sleep(0)
    assert space.try_take(1) is None
    waiting.cancel()
    await asyncio.wait([waiting])
    assert space.try_take(1) == 3


async def test_full_means_overloaded_after_the_timeout() -> None:
    space = Space(4, name="slab")
    await space.take(3, timeout=1)
    with pytest.raises(Overloaded, match="slab is full: 3 of 4 blocks") as caught:
        await space.take(2, timeout=0.01)
    assert caught.value.retry_after
    assert space.waiting == 0
    with pytest.raises(Overloaded):
        await space.take(2, timeout=-1.0)


async def test_what_can_never_fit_is_refused_at_once() -> None:
    space = Space(4, name="slab")
    with pytest.raises(HandOffError, match="never fit the slab"):
        await space.take(5, timeout=60)


async def test_a_waiter_that_leaves_lets_the_next_one_in() -> None:
    space = Space(4, name="slab")
    await space.take(2, timeout=1)
    for leave in ("cancel", "timeout"):
        first = asyncio.ensure_future(space.take(3, timeout=1 if leave == "cancel" else 0.01))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(space.take(2, timeout=1))
        await asyncio.sleep(0)
        if leave == "cancel":
            first.cancel()
        await asyncio.wait([first])
        space.give(await second, 2)
        assert first.cancelled() or isinstance(first.exception(), Overloaded)
        assert (space.used, space.waiting) == (2, 0)


async def test_a_waiter_cancelled_as_it_is_served_gives_its_range_back() -> None:
    space = Space(4, name="slab")
    start = await space.take(4, timeout=1)
    waiting = asyncio.ensure_future(space.take(4, timeout=1))
    await asyncio.sleep(0)
    space.give(start, 4)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert space.used == 0


async def test_closing_ends_every_wait() -> None:
    space = Space(1, name="slab")
    await space.take(1, timeout=1)
    waiting = asyncio.ensure_future(space.take(1, timeout=60))
    await asyncio.sleep(0)
    space.fail_waiters(HandOffError("the slab is closed"))
    with pytest.raises(HandOffError, match="closed"):
        await waiting


async def test_a_shared_range_goes_back_with_its_last_holder() -> None:
    space = Space(4, name="staging")
    shared = await space.share(3, timeout=1)
    assert isinstance(shared, SharedRange)
    shared.hold()
    shared.drop()
    assert space.used == 3
    shared.drop()
    assert space.used == 0
