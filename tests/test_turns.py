"""Turns on slots: shares of clients, their order, and what is given back by those who leave."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest

from tessera.turns import Rounds, Threads, Turns
from tests.waiting import until


class Holder:
    """Tasks that each hold a slot until they are told to leave, by name."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def enter(self, name: str, client: str = "", *, size: int = 1, priority: int = 0) -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name, client, size, priority))
        await settle()

    async def _hold(self, name: str, client: str, size: int, priority: int) -> None:
        async with self._turns.slot(client, size=size, priority=priority):
            self.inside.append(name)
            await self._leave[name].wait()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await asyncio.gather(*(self._tasks[name] for name in names), return_exceptions=True)
        await settle()

    async def end(self) -> None:
        await self.cancel(*self._tasks)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_needs_several_turns_keeps_its_place() -> None:
    turns = Turns(1)
    await turns.take()
    first, order = turns.place(), list[str]()

    async def take(name: str, place: int | None = None) -> None:
        await turns.take(place=place)
        order.append(name)

    waiting = asyncio.create_task(take("another"))
    await settle()
    again = asyncio.create_task(take("the next turn", first))
    await settle()
    for _ in range(2):
        turns.give()
        await settle()
    assert order == ["the next turn", "another"]
    await asyncio.gather(waiting, again)
    turns.give()
    assert (turns.used, turns.waiting) == (0, 0)


async def test_unnamed_clients_share_all_slots_in_order() -> None:
    turns = Turns(2)
    holder = Holder(turns)
    for name in "abcd":
        await holder.enter(name)
    assert holder.inside == ["a", "b"]
    assert (turns.used, turns.waiting) == (2, 2)
    await holder.leave("b")
    await holder.leave("a")
    assert holder.inside == ["a", "b", "c", "d"]
    await holder.end()
    assert (turns.used, turns.waiting) == (0, 0)


async def test_a_client_holds_a_quarter_of_what_the_others_leave_free() -> None:
    turns = Turns(64)
    holder = Holder(turns)
    for number in range(70):
        await holder.enter(f"alice{number}", "alice")
    assert len(holder.inside) == 16
    for number in range(70):
        await holder.enter(f"bob{number}", "bob")
    # Of the 48 that alice leaves.
    assert sum(name.startswith("bob") for name in holder.inside) == 12
    await holder.end()
    assert (turns.used, turns.waiting) == (0, 0)


async def test_a_client_goes_on_when_it_has_given_a_slot_back() -> None:
    turns = Turns(8)
    holder = Holder(turns)
    for name, client in (("x", "x"), ("y", "y"), ("z", "z")):
        await holder.enter(name, client)
    await holder.enter("x1", "x")
    await holder.enter("x2", "x")
    assert holder.inside == ["x", "y", "z", "x1"]
    await holder.leave("y")
    await holder.leave("z")
    await holder.enter("x3", "x")
    # Of eight, a quarter.
    assert [name for name in holder.inside if name.startswith("x")] == ["x", "x1"]
    await holder.leave("x1")
    assert holder.inside[-1] == "x2"
    await holder.end()


async def test_one_slot_of_few_is_enough_for_each_client() -> None:
    holder = Holder(Turns(2))
    for number in range(5):
        await holder.enter(f"alice{number}", "alice")
    assert holder.inside == ["alice0"]
    await holder.enter("bob0", "bob")
    assert holder.inside == ["alice0", "bob0"]
    await holder.enter("carol0", "carol")
    await holder.enter("bob1", "bob")
    await holder.leave("alice0")
    await holder.leave("bob0")
    # All three in turns, whoever has more to do.
    assert set(holder.inside[2:4]) == {"alice1", "carol0"}
    await holder.leave("carol0")
    assert holder.inside[4] == "bob1"
    await holder.end()


async def test_smaller_priorities_go_first_among_a_clients_own() -> None:
    holder = Holder(Turns(2))
    await holder.enter("first", "alice")
    await holder.enter("late", "alice", priority=5)
    await holder.enter("later", "alice", priority=9)
    await holder.enter("urgent", "alice", priority=-1)
    for name in ("first", "urgent", "late"):
        await holder.leave(name)
    assert holder.inside == ["first", "urgent", "late", "later"]
    await holder.end()


async def test_those_who_leave_the_queue_hold_nobody_up() -> None:
    turns = Turns(1)
    holder = Holder(turns)
    for number, client in enumerate(("", "", "alice", "alice", "bob", "")):
        await holder.enter(f"{number}", client)
    await holder.cancel("1", "3", "2")
    assert (turns.used, turns.waiting) == (1, 2)
    await holder.cancel("0")
    await holder.leave(holder.inside[-1])
    await holder.leave(holder.inside[-1])
    assert set(holder.inside) == {"0", "4", "5"}
    assert (turns.used, turns.waiting) == (0, 0)


async def test_a_slot_that_comes_together_with_a_cancellation_goes_to_the_next() -> None:
    turns = Turns(1)
    await turns.take()
    second, third = asyncio.create_task(turns.take()), asyncio.create_task(turns.take())
    await settle()
    # Both before the second one runs again: in this order its future is done, in the other it is cancelled.
    turns.give()
    second.cancel()
    await asyncio.wait_for(third, 60)
    assert second.cancelled()
    fourth, fifth = asyncio.create_task(turns.take()), asyncio.create_task(turns.take())
    await settle()
    fourth.cancel()
    turns.give()
    await asyncio.wait_for(fifth, 60)
    assert fourth.cancelled()
    turns.give()
    assert (turns.used, turns.waiting) == (0, 0)


async def test_a_thread_keeps_its_slot_until_its_work_has_returned() -> None:
    threads = Threads(1, "test")
    go = threading.Event()
    gone = asyncio.create_task(threads.run(lambda: go.wait(60)))
    await settle()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert threads.turns.used == 1
    behind = asyncio.create_task(threads.run(lambda: "done"))
    await settle()
    assert threads.turns.waiting == 1
    go.set()
    assert await asyncio.wait_for(behind, 60) == "done"
    await settle()
    assert (threads.turns.used, threads.turns.waiting) == (0, 0)
    threads.close()


async def test_what_work_raises_is_raised_and_gives_the_slot_back() -> None:
    threads = Threads(1, "test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    await settle()
    assert threads.turns.used == 0
    threads.close()


async def test_what_work_raises_is_nobodys_whose_caller_has_gone() -> None:
    threads, reported = Threads(1, "test"), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    go = threading.Event()

    def fail() -> None:
        go.wait(60)
        raise ZeroDivisionError

    gone = asyncio.create_task(threads.run(fail))
    await settle()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    go.set()
    # Behind it on the only thread.
    await asyncio.wait_for(threads.run(lambda: None), 60)
    gc.collect()
    await settle()
    assert reported == []
    threads.close()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("leaves", [False, True])
async def test_what_failed_work_had_goes_with_its_caller(leaves: bool) -> None:
    class Body:
        """Stands for the megabytes of a request."""

    threads, go = Threads(1, "test"), threading.Event()

    def fail(body: Body) -> None:
        go.wait(60)
        raise ZeroDivisionError

    left = weakref.ref(body := Body())
    asked = asyncio.create_task(threads.run(partial(fail, body)))
    del body
    await settle()
    if leaves:
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
    go.set()
    if not leaves:
        with suppress(ZeroDivisionError):
            await asked
    del asked
    await asyncio.wait_for(threads.run(lambda: None), 60)
    assert left() is None
    threads.close()


async def test_rounds_go_to_one_after_the_other_and_past_those_who_left() -> None:
    rounds, went = Rounds(), []

    async def go(name: str) -> None:
        await rounds.turn()
        went.append(name)

    tasks = [asyncio.create_task(go(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    seen = []
    while not all(task.done() for task in tasks):
        seen.append(len(went))
        await asyncio.sleep(0)
    assert went == ["a", "c", "d"]
    assert all(after - before <= 1 for before, after in pairwise(seen))


async def test_rounds_go_to_clients_in_turns() -> None:
    rounds, went = Rounds(), []
    loop = asyncio.get_running_loop()

    def again(client: str, left: int) -> None:
        went.append(client)
        if left:
            rounds.wait(loop, partial(again, client, left - 1), client)

    for number in range(3):
        for client in ("many", "many", "few", ""):
            if client == "many" or number < 1:
                rounds.wait(loop, partial(again, client, 1), client)
    await until(lambda: len(went) == 16)
    # While others have something to do, each has one of so many.
    assert went[:6] == ["many", "few", ""] * 2
    assert went[6:] == ["many"] * 10
