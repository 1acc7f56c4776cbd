"""Who goes first: clients by turns, urgent work before the rest, and nobody left behind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.batching.queue import Entry
from tessera.budgets import FairQueue
from tessera.errors import Overloaded
from tests.batching.conftest import MakeBatcher
from tests.batching.engines import HeldEngine
from tests.batching.test_batches import busy


class Queue:
    """A queue whose entries are named by numbers."""

    def __init__(self) -> None:
        self._queue: FairQueue[Entry[int, None]] = FairQueue()
        self.entries: dict[int, Entry[int, None]] = {}

    def push(self, name: int, size: int = 1, client: str = "", priority: int = 0) -> None:
        # The queue never looks at the future.
        entry: Entry[int, None] = Entry(name, size, client, priority, None, 0.0, lambda: None)  # type: ignore[arg-type]
        self.entries[name] = entry
        self._queue.push(entry)

    def remove(self, name: int) -> None:
        self._queue.remove(self.entries[name])

    def drain(self, count: int | None = None) -> list[int]:
        served: list[int] = []
        while self._queue and (count is None or len(served) < count):
            head = self._queue.head()
            assert self._queue.pop() is head
            served.append(head.payload)
        return served


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_one_client_is_served_in_order(queue: Queue) -> None:
    for name, size in enumerate((5, 1, 9, 1, 1, 30)):
        queue.push(name, size, client="a")
    assert queue.drain() == list(range(6))


def test_a_latecomer_does_not_stand_behind_a_flood(queue: Queue) -> None:
    for name in range(100):
        queue.push(name, 10, client="flood")
    assert queue.drain(20) == list(range(20))
    queue.push(100, 10, client="late")
    queue.push(101, 10, client="late")
    assert {100, 101} <= set(queue.drain(5))


def test_clients_share_by_size_not_by_count(queue: Queue) -> None:
    sizes = {"small": 10, "large": 100}
    for name in range(400):
        queue.push(name, 10, client="small")
    for name in range(400, 440):
        queue.push(name, 100, client="large")
    served: Counter[str] = Counter()
    for name in queue.drain(220):
        client = "small" if name < 400 else "large"
        served[client] += sizes[client]
    assert served["small"] == pytest.approx(served["large"], rel=0.1)


def test_having_been_idle_saves_up_nothing(queue: Queue) -> None:
    for name in range(100):
        queue.push(name, 10, client="steady")
    queue.drain(90)
    for name in range(100, 120):
        queue.push(name, 10, client="idle")
    first = queue.drain(10)
    assert 4 <= sum(name < 100 for name in first) <= 6


def test_smaller_priorities_go_first(queue: Queue) -> None:
    for name, priority in enumerate((0, 5, -3, 0, 5, -3)):
        queue.push(name, priority=priority)
    assert queue.drain() == [2, 5, 0, 3, 1, 4]


def test_urgent_work_without_end_leaves_a_ninth_to_the_rest(queue: Queue) -> None:
    for name in range(1000, 1020):
        queue.push(name, priority=9)
    served: list[int] = []
    for name in range(900):
        queue.push(name, priority=0)
        if name >= 10:
            served += queue.drain(1)
    assert sum(name >= 1000 for name in served[:180]) == 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 50), st.sampled_from(["", "a", "b"]), st.integers(-2, 2)),
            st.sampled_from(["pop", "remove"]),
        ),
        max_size=300,
    )
)
def test_every_entry_leaves_once(steps: list[object]) -> None:
    queue = Queue()
    waiting: set[int] = set()
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            queue.push(number, *step)
            waiting.add(number)
        elif waiting and step == "remove":
            queue.remove(waiting.pop())
        elif waiting:
            (served,) = queue.drain(1)
            waiting.remove(served)
    assert sorted(queue.drain()) == sorted(waiting)
    assert not queue._queue._heap and not queue._queue._arrivals and not queue._queue._finish


def test_what_is_discarded_is_not_kept(queue: Queue) -> None:
    queue.push(-1, priority=0)
    for name in range(10_000):
        queue.push(name, priority=1)
        queue.remove(name)
    assert len(queue._queue._heap) < 200 and len(queue._queue._arrivals) < 200


async def test_a_batch_is_filled_by_turns_and_by_priority(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=4)
    first = await busy(batcher, engine)
    # The open batch takes what comes until it is full; what waits behind it is sorted.
    futures = [batcher.submit(number, 1, client="a") for number in range(1, 9)]
    futures += [batcher.submit(number, 1, client="b") for number in (21, 22)]
    futures += [batcher.submit(31, 1, client="a", priority=-1)]
    engine.gate.set()
    await asyncio.gather(first, *futures)
    assert engine.batches[1] == [1, 2, 3, 4]
    assert engine.batches[2][0] == 31
    assert engine.batches[2][1:] == [5, 21, 6]


async def test_one_client_cannot_take_all_the_room(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=10, max_queued=100)
    first = await busy(batcher, engine)
    futures = []
    with pytest.raises(Overloaded):
        for number in range(1, 200):
            futures.append(batcher.submit(number, 1, client="greedy"))
    # Four fifths of the queue and of what the engine's batch has left.
    assert len(futures) == 4 * (100 + 9) // 5
    futures += [batcher.submit(number, 1, client="modest") for number in range(200, 210)]
    engine.gate.set()
    await asyncio.gather(first, *futures)


async def test_the_queue_is_as_long_as_the_engine_is_fast(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine(work=lambda: time.sleep(0.02))
    batcher = make_batcher(engine.launch, budget=10, max_queued=10_000, max_wait=0.5)
    await asyncio.gather(*(batcher.submit(number, 10) for number in range(5)))
    # About 500 a second at most: half a second holds 250 and no more, beside the nine that the batch of one
    # leaves.
    first = await busy(batcher, engine)
    futures = []
    with pytest.raises(Overloaded) as caught:
        for number in range(100, 2000):
            futures.append(batcher.submit(number, 1))
    assert 19 <= len(futures) <= 259
    assert caught.value.retry_after is not None and caught.value.retry_after <= 1.0
    engine.gate.set()
    await asyncio.gather(first, *futures)


async def test_what_keeps_to_the_capacity_is_not_refused_however_full_batches_are(
    make_batcher: MakeBatcher,
) -> None:
    """Callers are told the capacity; a batch of one small entry leaves the rest of it to the queue."""
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=50, max_queued=100)
    assert batcher.capacity == 150
    futures = [await busy(batcher, engine)]
    futures += [batcher.submit(number, 1) for number in range(1, 150)]
    with pytest.raises(Overloaded, match=r"\(149 of 149 waiting\)"):
        batcher.submit(150, 1)
    futures.pop().cancel()
    futures.append(batcher.submit(151, 1))
    engine.gate.set()
    await asyncio.gather(*futures)
    # All that ran has given its room back.
    first = await busy(batcher, engine)
    batcher.check(149)
    engine.gate.set()
    await first


async def test_room_is_free_as_soon_as_its_holder_is_cancelled(make_batcher: MakeBatcher) -> None:
    engine = HeldEngine()
    batcher = make_batcher(engine.launch, budget=10, max_queued=30)
    first = await busy(batcher, engine)
    futures = [batcher.submit(number, 10) for number in (1, 2, 3)]
    futures[2].cancel()
    await asyncio.sleep(0)
    assert batcher.queued == 20
    futures[2] = batcher.submit(4, 10)
    engine.gate.set()
    await asyncio.gather(first, *futures)
    assert engine.batches == [[0], [1], [2], [4]]
