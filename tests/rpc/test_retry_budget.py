"""How many calls may be made again."""

from __future__ import annotations

from tessera.budgets import RetryBudget
from tests.clock import Clock


def spend(budget: RetryBudget) -> int:
    count = 0
    while budget.take():
        count += 1
    return count


def test_a_worker_that_dies_may_be_left_all_at_once() -> None:
    budget = RetryBudget(burst=1000, clock=Clock())
    assert budget.take(1000)
    assert not budget.take()


def test_a_brown_out_adds_a_fifth_of_the_load() -> None:
    clock = Clock()
    budget = RetryBudget(burst=100, clock=clock)
    spend(budget)
    retries = 0
    for _ in range(10_000):
        budget.called()
        retries += budget.take()
    assert retries == 2000


def test_a_service_without_much_to_do_may_always_try_again() -> None:
    clock = Clock()
    budget = RetryBudget(burst=100, clock=clock)
    spend(budget)
    clock.now += 1.0
    assert spend(budget) == 10
    clock.now += 1e6
    assert spend(budget) == 100
