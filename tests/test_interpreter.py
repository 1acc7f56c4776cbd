"""A busy event loop leaves the interpreter to the threads of its process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tessera import interpreter
from tessera.interpreter import Bystander, SharedInterpreter
from tests.waiting import until, wait_until

ROUNDS = 600
# Shorter than the switch interval, which a waiting thread would otherwise ask after.
ROUND_SECONDS = 0.001


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    made = Bystander()
    yield made
    made.end()
    made.thread.join(60)
    assert not made.thread.is_alive()


def test_a_thread_has_had_its_turn_when_it_was_given_way(bystander: Bystander) -> None:
    assert all(bystander.give_way(60.0) for _ in range(100))


def test_a_thread_that_came_later_than_it_was_waited_for_ends(bystander: Bystander) -> None:
    assert not bystander.give_way(0.0) or not bystander.give_way(0.0)
    wait_until(lambda: bystander._asked.locked() and not bystander._came.locked())


def test_a_thread_comes_to_its_turns_while_the_loop_is_busy() -> None:
    """In 600 rounds it had none to three, where it and the loop had a core each; now 100 and more."""
    turns, over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not over.is_set():
            time.sleep(0.001)
            turns += 1

    async def be_busy() -> int:
        sharing = SharedInterpreter()
        thread = threading.Thread(target=take_turns)
        thread.start()
        # Behind the first look, which is for idle loops.
        await asyncio.sleep(0.05)
        before = turns
        for _ in range(ROUNDS):
            end = time.perf_counter() + ROUND_SECONDS
            while time.perf_counter() < end:
                sum(range(50))
            await asyncio.sleep(0)
        over.set()
        sharing.cancel()
        return turns - before

    assert uvloop.run(be_busy()) > ROUNDS // 60


async def test_a_loop_gives_way_where_it_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, gave, looks = 0, 0, 0

    class Counting(Bystander):
        def give_way(self, seconds: float = 60.0) -> bool:
            nonlocal gave
            gave += 1
            return super().give_way(seconds)

    def counted(found: Callable[[], int]) -> Callable[[], int]:
        def count() -> int:
            nonlocal looks
            looks += 1
            return found()

        return count

    monkeypatch.setattr(interpreter, "Bystander", Counting)

    def more() -> int:
        nonlocal waits
        waits += 1
        return waits

    monkeypatch.setattr(interpreter, "_waits", counted(more))
    sharing = SharedInterpreter()
    await until(lambda: looks > 6)
    assert gave == 0
    monkeypatch.setattr(interpreter, "_waits", counted(lambda: waits))
    await until(lambda: gave > 2)
    sharing.cancel()
    sharing._bystander.thread.join(60)
    assert not sharing._bystander.thread.is_alive()
