"""When a batch follows one that runs, where an engine takes two at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tessera.batching import Batcher
from tessera.batching.pace import Pace
from tessera.launched import Launched
from tests.batching.conftest import MakeBatcher
from tests.batching.engines import AsyncEngine
from tests.clock import Clock
from tests.waiting import until


def test_what_is_not_known_is_not_waited_for() -> None:
    assert Pace().due(100, 0.0, 10, now=0.0)


def test_a_batch_is_due_when_there_is_time_to_launch_it_and_no_more() -> None:
    pace = Pace()
    pace.launched(100, 0.010)
    pace.ran(100, 0.0, 0.100)
    # 200 end at 1.2; launching 50 takes 5 ms, twice that and 3 ms are left free.
    assert not pace.due(200, 1.0, 50, now=1.186)
    assert pace.due(200, 1.0, 50, now=1.188)
    # What waits is less: it may wait for longer.
    assert not pace.due(200, 1.0, 10, now=1.188)


def test_a_batch_behind_another_one_began_when_that_had_ended() -> None:
    pace = Pace()
    pace.ran(100, 0.0, 0.1)
    pace.ran(100, 0.01, 0.2)
    assert not pace.due(100, 0.11, 0, now=0.29)
    assert pace.due(100, 0.11, 0, now=0.30)


def test_small_batches_say_little_of_large_ones() -> None:
    pace, now = Pace(), 0.0
    for _ in range(20):
        pace.ran(1, now, now + 0.002)
        now += 0.002
    pace.ran(1000, now, now + 0.1)
    now += 0.1
    # Not the 2 s of a thousand alone.
    assert pace.due(1000, now, 0, now=now + 0.115)


async def paced(
    make_batcher: MakeBatcher, engine: AsyncEngine, clock: Clock, **options: Any
) -> Batcher[int, int]:
    """A batcher that has seen one batch: a tenth of a second for each unit of size."""
    batcher = make_batcher(engine.launch, depth=2, clock=clock, **options)
    first = batcher.submit(0, 10)
    await until(lambda: engine.launched)
    clock.now += 1.0
    engine.launched[0].finish.set()
    await first
    return batcher


async def test_a_batch_grows_until_the_running_one_is_about_to_end(make_batcher: MakeBatcher) -> None:
    engine, clock = AsyncEngine(), Clock()
    batcher = await paced(make_batcher, engine, clock)
    # Runs for five seconds.
    second = batcher.submit(1, 50)
    await until(lambda: len(engine.launched) == 2)
    later = []
    for payload in (2, 3, 4):
        later.append(batcher.submit(payload, 10))
        # Time for the engine's thread to look; it must not take one by one.
        await asyncio.sleep(0.01)
    clock.now += 4.9999
    await until(lambda: len(engine.launched) == 3)
    assert engine.launched[2].payloads == [2, 3, 4]
    for batch in engine.launched:
        batch.finish.set()
    assert [outcome.value for outcome in await asyncio.gather(second, *later)] == [-1, -2, -3, -4]


async def test_a_full_batch_follows_at_once(make_batcher: MakeBatcher) -> None:
    engine, clock = AsyncEngine(), Clock()
    batcher = await paced(make_batcher, engine, clock, budget=100)
    futures = [batcher.submit(1, 50)]
    await until(lambda: len(engine.launched) == 2)
    futures += [batcher.submit(payload, 40) for payload in (2, 3, 4)]
    await until(lambda: len(engine.launched) == 3)
    assert engine.launched[2].payloads == [2, 3]
    engine.launched[1].finish.set()
    engine.launched[2].finish.set()
    await until(lambda: len(engine.launched) == 4)
    engine.launched[3].finish.set()
    await asyncio.gather(*futures)


async def test_what_waits_behind_a_running_batch_is_run_when_the_batcher_closes(
    make_batcher: MakeBatcher,
) -> None:
    engine, clock = AsyncEngine(), Clock()
    batcher = await paced(make_batcher, engine, clock)
    engine.automatic = True
    futures = [batcher.submit(1, 50), batcher.submit(2, 10)]
    await batcher.close()
    assert [outcome.value for outcome in await asyncio.gather(*futures)] == [-1, -2]


async def test_behind_a_batch_that_tells_when_it_is_done_only_a_full_one_follows(
    make_batcher: MakeBatcher,
) -> None:
    engine = AsyncEngine(telling=True)
    batcher = make_batcher(engine.launch, depth=2, budget=100)
    futures = [batcher.submit(1, 50)]
    await until(lambda: engine.launched)
    futures += [batcher.submit(payload, 40) for payload in (2, 3)]
    await asyncio.sleep(0.02)
    assert len(engine.launched) == 1
    # The third does not fit any more, so the batch before it is full.
    futures.append(batcher.submit(4, 40))
    await until(lambda: len(engine.launched) == 2)
    assert engine.launched[1].payloads == [2, 3]
    engine.launched[0].end()
    assert (await futures[0]).value == -1
    await asyncio.sleep(0.02)
    assert len(engine.launched) == 2
    engine.launched[1].end()
    await until(lambda: len(engine.launched) == 3)
    engine.launched[2].end()
    assert [outcome.value for outcome in await asyncio.gather(*futures)] == [-1, -2, -3, -4]


async def test_a_batch_that_tells_is_waited_for_when_the_batcher_closes(make_batcher: MakeBatcher) -> None:
    engine = AsyncEngine(telling=True)
    batcher = make_batcher(engine.launch, depth=2)
    future = batcher.submit(1, 1)
    await until(lambda: engine.launched)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0.02)
    assert not closing.done()
    engine.launched[0].end()
    await closing
    assert (await future).value == -1


async def test_what_is_computed_later_holds_up_no_result_and_no_batch(make_batcher: MakeBatcher) -> None:
    told, events = AsyncEngine(telling=True), []

    def launch(payloads: Sequence[int]) -> Launched[list[int]]:
        if payloads[0] == 1:
            return told.launch(payloads)

        def compute() -> list[int]:
            events.append(payloads[0])
            return [-payload for payload in payloads]

        return Launched.later(compute)

    batcher = make_batcher(launch, depth=2, budget=100)
    first = batcher.submit(1, 50)
    first.add_done_callback(lambda _: events.append(1))
    await until(lambda: told.launched)
    others = [batcher.submit(payload, 60) for payload in (2, 3)]
    await asyncio.sleep(0.02)
    # The second batch is full, and behind the first.
    assert events == []
    told.launched[0].end()
    assert [outcome.value for outcome in await asyncio.gather(first, *others)] == [-1, -2, -3]
    assert sorted(events) == [1, 2, 3] and events.index(2) < events.index(3)
