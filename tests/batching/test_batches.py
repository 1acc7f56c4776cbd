"""What rides together: budgets, order, growth while the engine is busy."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.batching import Batcher
from tessera.engine.batch import packed_cost, padded_cost
from tests.batching.conftest import MakeBatcher
from tests.batching.engines import HeldEngine
from tests.waiting import until


async def busy(batcher: Batcher[int, int], engine: HeldEngine) -> asyncio.Future[object]:
    """Occupy the engine with payload 0 until the gate opens."""
    engine.gate.clear()
    first: asyncio.Future[object] = batcher.submit(0, 1)  # type: ignore[assignment]
    await asyncio.to_thread(engine.entered.acquire)
    # The batcher has heard that the slot was emptied.
    await until(lambda: not batcher.queued)
    return first


async def test_an_entry_alone_is_not_kept_waiting(make_batcher: MakeBatcher) -> None:
    outcome = await make_batcher(HeldEngine().launch).submit(7, 3)
    assert outcome.value == -7
    assert outcome.queue_ms >= 0 and outcome.run_ms >= 0


async def test_what_comes_at_once_to_an_idle_engine_runs_at_once(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch)
    await asyncio.gather(*(batcher.submit(payload, 10) for payload in range(1, 6)))
    assert engine.batches == [[1, 2, 3, 4, 5]]


async def test_the_next_batch_grows_while_the_engine_is_busy(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch)
    futures = [await busy(batcher, engine)]
    for payload in range(1, 6):
        futures.append(batcher.submit(payload, 10))  # type: ignore[arg-type]
        await asyncio.sleep(0.002)
    assert batcher.queued == 50
    engine.gate.set()
    await asyncio.gather(*futures)
    assert engine.batches == [[0], [1, 2, 3, 4, 5]]


async def test_packed_batches_keep_the_sum_within_the_budget(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=100)
    first = await busy(batcher, engine)
    sizes = {1: 60, 2: 40, 3: 1, 4: 99, 5: 1}
    futures = [batcher.submit(payload, size) for payload, size in sizes.items()]
    engine.gate.set()
    await asyncio.gather(first, *futures)
    assert engine.batches[1:] == [[1, 2], [3, 4], [5]]


async def test_padded_batches_keep_count_times_longest_within_the_budget(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, cost=padded_cost, budget=100)
    first = await busy(batcher, engine)
    sizes = {1: 10, 2: 10, 3: 33, 4: 34, 5: 10}
    futures = [batcher.submit(payload, size) for payload, size in sizes.items()]
    engine.gate.set()
    await asyncio.gather(first, *futures)
    # 3 x 33 fits, 4 x 34 does not, 2 x 34 does.
    assert engine.batches[1:] == [[1, 2, 3], [4, 5]]


async def test_a_free_engine_does_not_leave_with_part_of_what_waits(make_batcher: MakeBatcher) -> None:
    def slow(count: int, total: int, longest: int) -> int:
        # Time for the engine's thread to look while the batch is filled.
        time.sleep(0.001)
        return total

    engine = HeldEngine()
    batcher = make_batcher(engine.launch, cost=slow, budget=4)
    for _ in range(10):
        engine.batches.clear()
        first = await busy(batcher, engine)
        futures = [batcher.submit(payload, 1) for payload in range(1, 13)]
        engine.gate.set()
        await asyncio.gather(first, *futures)
        assert engine.batches[1:] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


async def test_an_entry_over_the_budget_rides_alone(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=100)
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, size) for payload, size in {1: 5, 2: 500, 3: 5}.items()]
    engine.gate.set()
    await asyncio.gather(first, *futures)
    assert engine.batches[1:] == [[1], [2], [3]]


async def test_statistics_describe_the_batch(make_batcher: MakeBatcher) -> None:
    entries: list[float] = []
    sizes: list[float] = []
    seconds: list[float] = []
    engine = HeldEngine()
    batcher = make_batcher(
        engine.launch, entries=entries.append, sizes=[sizes.append], seconds=seconds.append
    )
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, 10) for payload in (1, 2, 3)]
    engine.gate.set()
    await asyncio.gather(first, *futures)
    assert list(zip(entries, sizes, strict=True)) == [(1, 1), (3, 30)]
    assert len(seconds) == 2 and all(value >= 0 for value in seconds)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=40),
    budget=st.integers(1, 120),
    padded=st.booleans(),
)
def test_any_load_is_answered_in_order_within_the_budget(sizes: list[int], budget: int, padded: bool) -> None:
    cost = padded_cost if padded else packed_cost

    async def run() -> None:
        engine = HeldEngine()
        batcher: Batcher[int, int] = Batcher(
            "test", engine.launch, cost=cost, budget=budget, max_queued=10**9, depth=1
        )
        outcomes = await asyncio.gather(*(batcher.submit(index, size) for index, size in enumerate(sizes)))
        assert [outcome.value for outcome in outcomes] == [-index for index in range(len(sizes))]
        assert batcher.queued == 0
        assert [payload for batch in engine.batches for payload in batch] == list(range(len(sizes)))
        for batch in engine.batches:
            of_batch = [sizes[payload] for payload in batch]
            assert len(batch) == 1 or cost(len(batch), sum(of_batch), max(of_batch)) <= budget
        await batcher.close()

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
async def test_results_arrive_in_the_order_of_the_batch(make_batcher: MakeBatcher, count: int) -> None:
    batcher = make_batcher(HeldEngine().launch, budget=count)
    outcomes = await asyncio.gather(*(batcher.submit(payload, 1) for payload in range(20)))
    assert [outcome.value for outcome in outcomes] == [-payload for payload in range(20)]
