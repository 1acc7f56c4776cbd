"""Rates of one key, on a clock that the test turns."""

from __future__ import annotations

import pytest

from tessera.errors import RateLimited
from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.http.errors import render
from tests.clock import Clock


def refused(call: object, *arguments: object) -> float:
    with pytest.raises(RateLimited) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.retry_after is not None
    return caught.value.retry_after


def test_requests_come_back_at_the_rate_and_keys_do_not_share() -> None:
    clock = Clock()
    limiter = RateLimiter(("a", "b"), requests_per_minute=6, clock=clock)
    for _ in range(6):
        limiter.admit("a")
    assert refused(limiter.admit, "a") == pytest.approx(10.0)
    limiter.admit("b")
    clock.now += 10
    limiter.admit("a")
    refused(limiter.admit, "a")
    clock.now += 3600
    for _ in range(6):
        limiter.admit("a")
    refused(limiter.admit, "a")


def test_tokens_may_be_owed_once() -> None:
    clock = Clock()
    limiter = RateLimiter(("a",), tokens_per_minute=600, clock=clock)
    limiter.charge("a", 1200)
    assert refused(limiter.charge, "a", 1) == pytest.approx(60.0)
    assert refused(limiter.admit, "a") == pytest.approx(60.0)
    clock.now += 61
    limiter.admit("a")
    limiter.charge("a", 5)


def test_zero_is_unlimited() -> None:
    limiter = RateLimiter(("a",), clock=Clock())
    for _ in range(1000):
        limiter.admit("a")
        limiter.charge("a", 10**9)


def test_a_slow_rate_still_lets_one_request_through() -> None:
    clock = Clock()
    limiter = RateLimiter(("a",), requests_per_minute=0.5, clock=clock)
    limiter.admit("a")
    assert refused(limiter.admit, "a") == pytest.approx(180.0)
    clock.now += 180
    limiter.admit("a")


def test_the_answer_says_when_to_come_back() -> None:
    failure = render(RateLimited("used up", retry_after=2.2))
    assert (failure.status, failure.headers["retry-after"]) == (429, "3")
    assert (failure.error["type"], failure.error["code"]) == ("rate_limit_error", "rate_limited")
