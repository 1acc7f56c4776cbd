"""The line in which calls wait for room."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tessera.errors import DeadlineExceeded, InvalidInput, Overloaded, RateLimited
from tessera.tasks import Deadline
from tessera_kserve.line import FULL, Line
from tests.waiting import until


class Places:
    def __init__(self, free: int) -> None:
        self.free = free
        self.taken: list[int] = []

    def take(self, number: int) -> int:
        if not self.free:
            raise Overloaded("full")
        self.free -= 1
        self.taken.append(number)
        return number


async def test_calls_get_room_in_the_order_in_which_they_came() -> None:
    line, places = Line(), Places(1)

    async def wait(number: int) -> int:
        return await line.wait("room", lambda: places.take(number), client="", deadline=Deadline.after(60))

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(0)
    await until(lambda: line.waiting == 4)
    assert places.taken == [0]
    for count in range(2, 6):
        places.free += 1
        await until(partial(lambda wanted: len(places.taken) == wanted, count))
    assert await asyncio.gather(*tasks) == places.taken == list(range(5))
    assert line.waiting == 0


async def test_one_room_holds_up_no_other() -> None:
    line, full, free = Line(), Places(0), Places(1)
    deadline = Deadline.after(60)
    stuck = asyncio.create_task(line.wait("full", lambda: full.take(0), client="", deadline=deadline))
    await until(lambda: line.waiting == 1)
    assert await line.wait("free", lambda: free.take(1), client="", deadline=deadline) == 1
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert line.waiting == 0


async def test_beyond_its_bounds_calls_are_refused_as_nvidias_client_expects() -> None:
    line, places = Line(most=2), Places(0)
    deadline = Deadline.after(60)
    waiting = [
        asyncio.create_task(line.wait("room", lambda: places.take(0), client="", deadline=deadline))
        for _ in range(2)
    ]
    await until(lambda: line.waiting == 2)
    with pytest.raises(Overloaded, match=FULL):
        await line.wait("room", lambda: places.take(0), client="", deadline=deadline)
    places.free = 2
    await asyncio.gather(*waiting)


async def test_a_deadline_ends_the_wait() -> None:
    line = Line()
    with pytest.raises(DeadlineExceeded):
        await line.wait("room", lambda: Places(0).take(0), client="", deadline=Deadline.after(0.02))
    assert line.waiting == 0


@pytest.mark.parametrize("error", [RateLimited("rate"), InvalidInput("wrong")])
async def test_what_waiting_does_not_mend_is_raised_at_once(error: Exception) -> None:
    def take() -> None:
        raise error

    with pytest.raises(type(error)):
        await Line().wait("room", take, client="", deadline=Deadline.after(30))


async def test_a_client_whose_share_of_the_room_is_used_holds_up_no_other() -> None:
    line, hers, his = Line(), Places(0), Places(1)
    deadline = Deadline.after(60)
    stuck = [
        asyncio.create_task(line.wait("room", lambda: hers.take(0), client="alice", deadline=deadline))
        for _ in range(3)
    ]
    await until(lambda: line.waiting == 3)
    assert await line.wait("room", lambda: his.take(1), client="bob", deadline=deadline) == 1
    hers.free = 3
    assert await asyncio.gather(*stuck) == [0, 0, 0]
    assert line.waiting == 0


async def test_a_client_leaves_others_a_place_to_wait() -> None:
    line, full, places = Line(most=10), Places(0), Places(0)
    deadline = Deadline.after(60)
    waiting = [
        asyncio.create_task(line.wait("room", lambda: full.take(0), client="alice", deadline=deadline))
        for _ in range(20)
    ]
    await until(lambda: sum(task.done() for task in waiting) == 12)
    assert line.waiting == 8
    other = asyncio.create_task(line.wait("room", lambda: places.take(1), client="bob", deadline=deadline))
    await until(lambda: line.waiting == 9)
    with pytest.raises(Overloaded, match=f"{FULL}: this API key's share"):
        await line.wait("room", lambda: full.take(0), client="alice", deadline=deadline)
    full.free = places.free = 20
    assert await other == 1
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert sorted(map(str, found))[:8] == ["0"] * 8 and line.waiting == 0
