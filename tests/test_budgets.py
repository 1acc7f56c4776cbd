"""A bounded amount, shared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from tessera.budgets import Budget
from tessera.errors import Overloaded
from tessera.tasks import run_all
from tests.waiting import all_turns


@dataclass(eq=False)
class Holding:
    """Stands for a request."""

    held_bytes: int = 0


def fill(budget: Budget, client: str, amount: int = 1) -> int:
    taken = 0
    while budget.admits(client, amount):
        budget.take(client, amount)
        taken += amount
    return taken


def test_unnamed_clients_share_the_whole() -> None:
    budget = Budget(lambda: 1000)
    assert fill(budget, "") == 1000
    budget.give("", 1000)
    assert budget.used == 0


def test_named_clients_leave_room_for_others() -> None:
    budget = Budget(lambda: 9000)
    assert fill(budget, "a") == 7200
    assert fill(budget, "b") > 1000
    assert fill(budget, "c") > 100
    for client in "abc":
        budget.give(client, budget.held(client))
    assert budget.used == 0 and budget.held("a") == 0


@pytest.mark.parametrize("amount", [1, 130, 700, 1000, 1300])
def test_the_fifth_that_one_client_leaves_is_whole_whatever_the_size_of_its_pieces(amount: int) -> None:
    budget = Budget(lambda: 10_000)
    assert 0 < fill(budget, "greedy", amount) <= 8000
    for _ in range(2):
        assert budget.admits("modest", 800)
        budget.take("modest", 800)
        # What the other one takes leaves the greedy one less than before.
        assert not budget.admits("greedy", amount)


def test_clients_that_come_and_go_end_with_equal_shares() -> None:
    budget = Budget(lambda: 9000)
    fill(budget, "a")
    for _ in range(2000):
        fill(budget, "b", 10)
        fill(budget, "a", 10)
        for client in "ab":
            budget.give(client, min(50, budget.held(client)))
    assert abs(budget.held("a") - budget.held("b")) < 0.05 * 9000


def test_a_first_piece_of_any_size_is_let_in() -> None:
    budget = Budget(lambda: 10)
    assert budget.admits("a", 500)
    budget.take("a", 500)
    assert not budget.admits("b", 3)
    assert fill(budget, "b") == 1
    assert not budget.admits("a", 1)


def test_the_limit_may_change() -> None:
    limit = [100]
    budget = Budget(lambda: limit[0])
    assert fill(budget, "") == 100
    limit[0] = 50
    assert not budget.admits("", 1)
    limit[0] = 200
    assert fill(budget, "") == 100


def test_a_limit_that_falls_takes_nobody_else_the_fifth_that_one_client_left() -> None:
    limit = [1000]
    budget = Budget(lambda: limit[0])
    assert fill(budget, "greedy") == 800
    limit[0] = 700
    assert not budget.admits("greedy", 1)
    assert not budget.admits("", 1)
    assert not budget.admits("modest", 141)
    assert budget.admits("modest", 100)
    budget.take("modest", 100)
    # All of those who come have one fifth.
    assert budget.admits("late", 40) and not budget.admits("late", 41)
    # It is none of several who share the whole.
    assert not budget.admits("modest", 1)


def test_many_clients_that_fill_a_limit_which_falls_let_nobody_in() -> None:
    limit = [1000]
    budget = Budget(lambda: limit[0])
    for number in range(10):
        budget.take(f"client {number}", 100)
    limit[0] = 700
    assert not budget.admits("late", 1)


async def test_who_waits_is_let_in_in_order_and_keeps_no_other_client_waiting() -> None:
    budget = Budget(lambda: 100)
    budget.take("alice", 70)
    let_in: list[int] = []

    async def hold(amount: int) -> None:
        await budget.hold_in_turn("alice", amount, 60, Holding())
        let_in.append(amount)

    # The second would fit, and the first would never have its turn if such ones went by.
    waiting = [asyncio.create_task(hold(amount)) for amount in (60, 5)]
    await all_turns()
    await budget.hold_in_turn("bob", 5, 60, Holding())
    assert not let_in
    budget.give("bob", 5)
    budget.give("alice", 70)
    await asyncio.gather(*waiting)
    assert let_in == [60, 5] and budget.used == budget.held("alice") == 65


@pytest.mark.parametrize("clients", ["aa", "ab", "a"])
async def test_where_those_who_wait_hold_all_there_is_the_first_gives_it_back_at_once(clients: str) -> None:
    budget = Budget(lambda: 90 if "b" in clients else 80)
    requests = [Holding() for _ in clients]
    refused: list[Holding] = []

    async def bring(client: str, request: Holding, amount: int) -> None:
        await budget.hold_in_turn(client, amount, 3600, request)
        request.held_bytes += amount

    async def work(client: str, request: Holding) -> None:
        try:
            # More than there is room for beside each other.
            await run_all([bring(client, request, 15) for _ in range(2)])
        except Overloaded:
            refused.append(request)
        finally:
            budget.give(client, request.held_bytes)

    for client, request in zip(clients, requests, strict=True):
        await bring(client, request, 60 // len(clients))
    await run_all([work(*each) for each in zip(clients, requests, strict=True)])
    assert refused == requests[:1] and budget.used == 0


async def test_who_waits_in_vain_holds_nothing_and_leaves_the_line() -> None:
    budget = Budget(lambda: 100)
    budget.take("alice", 80)
    gone = asyncio.create_task(budget.hold_in_turn("alice", 50, 60, Holding()))
    await all_turns()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(Overloaded, match="share"):
        await budget.hold_in_turn("alice", 20, 0.05, Holding())
    assert budget.used == 80
    budget.give("alice", 80)
    await budget.hold_in_turn("alice", 50, 60, Holding())
    assert budget.used == 50
