"""Requests and tokens that one API key may use per minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tessera.errors import RateLimited

Clock = Callable[[], float]


class Bucket:
    """A token bucket that holds one minute's worth; a rate of 0 never runs dry."""

    def __init__(self, per_minute: float, clock: Clock = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._at = clock()

    def wait(self, amount: float = 0.0) -> float:
        """Seconds until more than nothing, or as much as ``amount``, is there; 0 when it is now."""
        if not self._per_minute:
            return 0.0
        now = self._clock()
        rate = self._per_minute / 60
        self._level = min(self._per_minute, self._level + (now - self._at) * rate)
        self._at = now
        if self._level > 0 and self._level >= min(amount, self._per_minute):
            return 0.0
        return max(0.001, (amount - self._level) / rate)

    def take(self, amount: float) -> None:
        """Take it even if that is more than there is: the debt is paid off before the next one."""
        if self._per_minute:
            self._level -= amount


class RateLimiter:
    """Two buckets for each key; owned by one event loop."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        requests_per_minute: float = 0.0,
        tokens_per_minute: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._requests = {name: Bucket(requests_per_minute, clock) for name in names}
        self._tokens = {name: Bucket(tokens_per_minute, clock) for name in self._requests}

    def admit(self, name: str) -> None:
        """Count a request; raises ``RateLimited`` when it is one too many, or tokens are owed."""
        if wait := self._requests[name].wait(1.0):
            raise RateLimited("this API key has used up its requests per minute", retry_after=wait)
        self._check_tokens(name)
        self._requests[name].take(1.0)

    def charge(self, name: str, tokens: int) -> None:
        """Count a request's tokens, which are known once it has been tokenised.

        Raises ``RateLimited`` when there are none left. A request larger than what is left is let through
        and leaves a debt; otherwise one larger than a minute's worth could never be sent.
        """
        self._check_tokens(name)
        self._tokens[name].take(tokens)

    def _check_tokens(self, name: str) -> None:
        if wait := self._tokens[name].wait():
            raise RateLimited("this API key has used up its tokens per minute", retry_after=wait)
