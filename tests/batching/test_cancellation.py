"""Cancelled entries never reach the engine, and their memory is given back once, and not too early."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from tessera.errors import Overloaded
from tests.batching.conftest import MakeBatcher
from tests.batching.engines import AsyncEngine, HeldEngine
from tests.batching.test_batches import busy
from tests.waiting import until


class Calls:
    """Counts the calls for each payload, and makes sure that the engine was done with it."""

    def __init__(self, engine: HeldEngine) -> None:
        self.counts: Counter[int] = Counter()
        self._engine = engine

    def of(self, payload: int):  # type: ignore[no-untyped-def]
        def call() -> None:
            assert payload not in self._engine.active
            self.counts[payload] += 1

        return call


async def test_cancelled_in_the_queue(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    calls = Calls(engine)
    batcher = make_batcher(engine.launch, budget=10)
    first = await busy(batcher, engine)
    # Payload 1 fills the open batch; 2 and 3 stand in the queue behind it.
    futures = {payload: batcher.submit(payload, 10, on_cancelled=calls.of(payload)) for payload in (1, 2, 3)}
    futures[2].cancel()
    engine.gate.set()
    await asyncio.gather(first, futures[1], futures[3])
    assert engine.batches == [[0], [1], [3]]
    assert calls.counts == {2: 1}
    assert batcher.queued == 0


async def test_cancelled_in_the_open_batch(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    calls = Calls(engine)
    batcher = make_batcher(engine.launch)
    first = await busy(batcher, engine)
    futures = {payload: batcher.submit(payload, 1, on_cancelled=calls.of(payload)) for payload in (1, 2)}
    futures[1].cancel()
    await asyncio.sleep(0)
    assert calls.counts == {}
    engine.gate.set()
    await asyncio.gather(first, futures[2])
    assert engine.batches == [[0], [2]]
    assert calls.counts == {1: 1}


async def test_a_batch_of_nothing_but_cancelled_entries_is_not_run(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    calls = Calls(engine)
    batcher = make_batcher(engine.launch)
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, 1, on_cancelled=calls.of(payload)) for payload in range(1, 9)]
    for future in futures:
        future.cancel()
    # The batcher hears of it in the loop's next turn.
    await asyncio.sleep(0)
    engine.gate.set()
    await first
    await until(lambda: not batcher.queued)
    assert engine.batches == [[0]]
    assert calls.counts == dict.fromkeys(range(1, 9), 1)


@pytest.mark.parametrize("fails", [False, True], ids=["and succeeds", "and fails"])
async def test_cancelled_while_the_engine_runs_it(make_batcher: MakeBatcher, fails: bool) -> None:
    engine = HeldEngine(poison={1} if fails else set())
    calls = Calls(engine)
    batcher = make_batcher(engine.launch)
    engine.gate.clear()
    future = batcher.submit(1, 1, on_cancelled=calls.of(1))
    await asyncio.to_thread(engine.entered.acquire)
    future.cancel()
    await asyncio.sleep(0.02)
    assert calls.counts == {}
    engine.gate.set()
    await until(lambda: calls.counts)
    assert calls.counts == {1: 1}


async def test_cancelled_between_launch_and_result(make_batcher: MakeBatcher) -> None:
    engine = AsyncEngine()
    called: list[int] = []
    batcher = make_batcher(engine.launch, depth=2)
    future = batcher.submit(1, 1, on_cancelled=lambda: called.append(1))
    await until(lambda: engine.launched)
    future.cancel()
    await asyncio.sleep(0.02)
    assert called == []
    engine.launched[0].finish.set()
    await until(lambda: called)
    assert called == [1]


async def test_on_cancelled_is_not_called_without_a_cancellation(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine(poison={2})
    calls = Calls(engine)
    batcher = make_batcher(engine.launch)
    futures = [batcher.submit(payload, 1, on_cancelled=calls.of(payload)) for payload in (1, 2)]
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(results[1], Exception)
    futures[0].cancel()
    await asyncio.sleep(0.01)
    assert calls.counts == {}


@pytest.mark.parametrize("seed", range(4))
async def test_a_storm_of_cancellations_leaves_nothing(make_batcher: MakeBatcher, seed: int) -> None:
    """Every entry ends in exactly one way: answered, failed, or reported as cancelled once."""
    chance = random.Random(seed)
    poison = {payload for payload in range(600) if payload % 50 == 7}
    engine = HeldEngine(poison=poison, work=lambda: time.sleep(0.0005))
    calls = Calls(engine)
    batcher = make_batcher(engine.launch, budget=40, max_queued=400, depth=1 + seed % 2)
    answered = failed = cancelled = refused = 0
    pending = []
    for payload in range(600):
        try:
            future = batcher.submit(payload, chance.randint(1, 30), on_cancelled=calls.of(payload))
        except Overloaded as error:
            assert error.retry_after is not None and error.retry_after > 0
            refused += 1
            await asyncio.sleep(0.001)
            continue
        pending.append((payload, future))
        if chance.random() < 0.5:
            chance.choice(pending)[1].cancel()
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.002)
    for payload, future in pending:
        try:
            assert (await future).value == -payload
            answered += 1
        except asyncio.CancelledError:
            cancelled += 1
        except Exception:
            assert payload in poison
            failed += 1
    await batcher.close()
    assert batcher.queued == 0
    assert set(calls.counts.values()) <= {1}
    assert len(calls.counts) == cancelled
    assert answered + failed + cancelled + refused == 600
    assert answered and failed and cancelled
