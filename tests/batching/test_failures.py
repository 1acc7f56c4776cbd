"""Engines that raise, queues that are full, batchers that close."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tessera.errors import EngineFailed, InvalidInput, Overloaded, Unavailable
from tessera.launched import Launched
from tessera.logs import RequestLine, serving
from tests.batching.conftest import MakeBatcher
from tests.batching.engines import AsyncEngine, HeldEngine
from tests.batching.test_batches import busy
from tests.waiting import until


async def test_a_poisonous_entry_fails_alone(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine(poison={5})
    batcher = make_batcher(engine.launch)
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, 1) for payload in range(1, 9)]
    engine.gate.set()
    await first
    results = await asyncio.gather(*futures, return_exceptions=True)
    for payload, result in enumerate(results, 1):
        if payload == 5:
            assert isinstance(result, EngineFailed)
            assert "cannot run [5]" in result.message
        else:
            assert not isinstance(result, BaseException) and result.value == -payload
    # Halved, not run one by one.
    assert engine.batches[1:] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [5, 6],
        [5],
        [6],
        [7, 8],
    ]
    # The engine goes on.
    assert (await batcher.submit(9, 1)).value == -9


async def test_the_log_names_the_requests_whose_batch_failed(
    make_batcher: MakeBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    engine = HeldEngine(poison={5})
    batcher = make_batcher(engine.launch)
    first = await busy(batcher, engine)
    futures = []
    for payload in (5, 6):
        with serving(RequestLine(f"request-{payload}")):
            futures.append(batcher.submit(payload, 1))
    engine.gate.set()
    await asyncio.gather(first, *futures, return_exceptions=True)
    halved, failed = (vars(record)["fields"] for record in caplog.records)
    assert halved == {"request_ids": "request-5,request-6"}
    assert failed == {"request_id": "request-5"}


async def test_an_error_of_the_tree_keeps_its_class(make_batcher: MakeBatcher) -> None:
    def launch(_: Sequence[int]) -> Launched[list[int]]:
        raise InvalidInput("no such thing", param="input[3]")

    with pytest.raises(InvalidInput) as caught:
        await make_batcher(launch).submit(1, 1)
    assert caught.value.param == "input[3]"


async def test_an_engine_that_returns_too_few_results_fails_the_entries(make_batcher: MakeBatcher) -> None:
    def launch(payloads: Sequence[int]) -> Launched[list[int]]:
        return Launched.of([])

    with pytest.raises(EngineFailed, match="0 results for 1 entries"):
        await asyncio.wait_for(make_batcher(launch).submit(1, 1), 60)


async def test_a_full_queue_says_when_to_come_back(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=10, max_queued=30)
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, 10) for payload in (1, 2, 3)]
    # The engine's batch, of one, leaves nine to the queue.
    with pytest.raises(Overloaded, match=r"30 of 39") as caught:
        batcher.submit(4, 10)
    assert caught.value.retry_after is not None and 0 < caught.value.retry_after < 60
    assert batcher.queued == 30
    engine.gate.set()
    await asyncio.gather(first, *futures)
    assert (await batcher.submit(4, 1)).value == -4


async def test_a_client_over_its_share_of_the_queue_is_told_so(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=10, max_queued=91)
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, 10, client="greedy") for payload in range(8)]
    with pytest.raises(
        Overloaded, match=r"^this API key's share of the \w+ queue is used \(80 of 80 waiting\)$"
    ):
        batcher.submit(9, 10, client="greedy")
    futures.append(batcher.submit(9, 10, client="modest"))
    engine.gate.set()
    await asyncio.gather(first, *futures)


async def test_an_entry_larger_than_the_queue_is_taken_when_it_is_alone(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher(HeldEngine().launch, budget=10, max_queued=30)
    assert (await batcher.submit(1, 500)).value == -1


async def test_two_batches_are_on_their_way_at_depth_two(make_batcher: MakeBatcher) -> None:
    engine = AsyncEngine()
    batcher = make_batcher(engine.launch, budget=2, depth=2)
    futures = [batcher.submit(payload, 1) for payload in range(6)]
    await until(lambda: len(engine.launched) == 2)
    await asyncio.sleep(0.05)
    assert len(engine.launched) == 2, "never more than the depth"
    engine.launched[0].finish.set()
    await until(lambda: len(engine.launched) == 3)
    done = [payload for payload, future in enumerate(futures) if future.done()]
    assert done == engine.launched[0].payloads
    engine.automatic = True
    for batch in engine.launched[1:]:
        batch.finish.set()
    assert [(await future).value for future in futures] == [-payload for payload in range(6)]


async def test_a_late_failure_is_halved_too(make_batcher: MakeBatcher) -> None:
    engine = AsyncEngine(poison={2}, automatic=True)
    batcher = make_batcher(engine.launch, depth=2)
    results = await asyncio.gather(
        *(batcher.submit(payload, 1) for payload in range(4)), return_exceptions=True
    )
    assert [isinstance(result, EngineFailed) for result in results] == [False, False, True, False]


@pytest.mark.parametrize("depth", [1, 2])
async def test_close_finishes_what_is_queued(make_batcher: MakeBatcher, depth: int) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=10, depth=depth)
    first = await busy(batcher, engine)
    futures = [batcher.submit(payload, 10) for payload in range(1, 6)]
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    with pytest.raises(Unavailable):
        batcher.submit(9, 1)
    engine.gate.set()
    await closing
    assert first.done()
    assert [future.result().value for future in futures] == [-payload for payload in range(1, 6)]


async def test_close_of_an_idle_batcher(make_batcher: MakeBatcher) -> None:
    batcher = make_batcher(HeldEngine().launch)
    await batcher.close()
    await batcher.close()
