"""One computation for each key at a time, whoever gives up."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator

import pytest

from tessera.errors import InvalidInput
from tessera.tasks import SingleFlight
from tests.waiting import all_turns, until

KEY = b"key"


class Work:
    """A computation that a test ends; counts how often it was begun and cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.begun += 1
        mine = self.begun
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return mine


@pytest.fixture(autouse=True)
async def complaints() -> Iterator[None]:
    """Nothing that asyncio would complain about, unretrieved errors above all."""
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["message"]))
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert seen == []


async def started(flights: SingleFlight[int], work: Work, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.ensure_future(flights.run(KEY, work)) for _ in range(count)]
    await all_turns()
    return tasks


async def test_concurrent_calls_share_one_computation() -> None:
    flights, work = SingleFlight[int](), Work()
    tasks = await started(flights, work, 5)
    work.end.set()
    assert await asyncio.gather(*tasks) == [1] * 5
    assert work.begun == 1


async def test_keys_do_not_share() -> None:
    flights, work = SingleFlight[int](), Work()
    work.end.set()
    assert sorted(await asyncio.gather(flights.run(b"a", work), flights.run(b"b", work))) == [1, 2]


async def test_a_result_is_not_kept() -> None:
    flights, work = SingleFlight[int](), Work()
    work.end.set()
    assert await flights.run(KEY, work) == 1
    assert await flights.run(KEY, work) == 2


@pytest.mark.parametrize("who", [0, 1, 2], ids=["leader", "waiter", "last waiter"])
async def test_one_that_gives_up_does_not_strand_the_rest(who: int) -> None:
    flights, work = SingleFlight[int](), Work()
    tasks = await started(flights, work, 3)
    tasks[who].cancel()
    await all_turns()
    assert tasks[who].cancelled()
    work.end.set()
    assert [await task for index, task in enumerate(tasks) if index != who] == [1, 1]
    assert work.cancelled == 0


async def test_the_computation_ends_when_nobody_waits() -> None:
    flights, work = SingleFlight[int](), Work()
    tasks = await started(flights, work, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await all_turns()
    assert work.cancelled == 1


async def test_who_comes_after_the_last_gave_up_starts_anew() -> None:
    flights, work = SingleFlight[int](), Work()
    release = asyncio.Event()

    async def slow_to_die() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()
        return 0

    dying = asyncio.ensure_future(flights.run(KEY, slow_to_die))
    await all_turns()
    dying.cancel()
    await all_turns()
    # The first computation is still winding up.
    work.end.set()
    assert await asyncio.wait_for(flights.run(KEY, work), 60) == 1
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await dying
    # Nor does its end take a successor with it.
    assert await flights.run(KEY, work) == 2


async def test_an_error_reaches_all_and_is_not_kept() -> None:
    flights, work = SingleFlight[int](), Work()
    work.error = InvalidInput("no image")
    tasks = await started(flights, work, 3)
    work.end.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, InvalidInput) for result in results)
    work.error = None
    assert await flights.run(KEY, work) == 2


async def test_an_error_that_nobody_waits_for_is_not_complained_about() -> None:
    flights = SingleFlight[int]()

    async def fails_when_cancelled() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("while giving up") from None
        return 0

    task = asyncio.ensure_future(flights.run(KEY, fails_when_cancelled))
    await all_turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_storm_of_cancellations() -> None:
    """Every survivor is answered, and no computation outlives those who wait for it."""
    chance = random.Random(1)
    flights = SingleFlight[int]()
    running = 0

    async def compute() -> int:
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(chance.random() * 0.003)
            return 1
        finally:
            running -= 1

    async def call(key: bytes) -> int:
        async with asyncio.timeout(chance.choice((0.001, 5))):
            return await flights.run(key, compute)

    results = []
    for _ in range(30):
        results += await asyncio.gather(
            *(call(bytes([chance.randrange(4)])) for _ in range(20)), return_exceptions=True
        )
    assert {type(result) for result in results} <= {int, TimeoutError}
    assert results.count(1) > 100
    await until(lambda: running == 0)
    assert not flights._flights
