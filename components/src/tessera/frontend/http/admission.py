"""How much work the frontend admits at a time, and how much one API key may use per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from tessera.budgets import Budget, Clock, TokenBucket
from tessera.errors import Overloaded, RateLimited
from tessera.rpc import Peers


class RateLimiter:
    """Two buckets for each key, of a minute's worth; a rate of 0 sets no limit. Owned by one event loop."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        requests_per_minute: float = 0.0,
        tokens_per_minute: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._requests = {name: _minute(requests_per_minute, clock) for name in names}
        self._tokens = {name: _minute(tokens_per_minute, clock) for name in self._requests}

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


def _minute(rate: float, clock: Clock) -> TokenBucket:
    return TokenBucket(rate or math.inf, rate / 60, clock)


# What a request is taken to cost until it is known: a moving average over those before it.
_FIRST_GUESS: Final = 64.0
_WEIGHT: Final = 0.05

# Of text, roughly; an image has many more.
_BYTES_PER_TOKEN: Final = 4


RESPONSES_IN_FLIGHT: Final = 16
"""How many answers of the largest size may be under way at a time."""


class Capacity:
    """The tokens and units that the workers together take from here at a time, as they say themselves.

    Nothing is admitted beyond that: a worker would refuse it when its body had been read and made into
    tokens. ``tokens`` and ``units`` ask for the sums over the workers that are there now. With no worker
    there, what was last known goes on: requests wait for a worker that is started again, and no more of them
    than before. ``unknown`` is what counts until the first worker is there.
    """

    def __init__(self, tokens: Callable[[], int], units: Callable[[], int], *, unknown: int) -> None:
        self._read_tokens = tokens
        self._read_units = units
        self._tokens = self._units = unknown

    @classmethod
    def of_workers(cls, embed: Peers, encode: Peers, *, unknown: int) -> Capacity:
        return cls(
            lambda: sum(info.tokens for info in embed.ready.values()),
            # Aggregated workers encode for themselves.
            lambda: sum(info.units for info in (*embed.ready.values(), *encode.ready.values())),
            unknown=unknown,
        )

    def tokens(self) -> int:
        self._tokens = self._read_tokens() or self._tokens
        return self._tokens

    def units(self) -> int:
        self._units = self._read_units() or self._units
        return self._units


class Admission:
    """Admits requests up to a number, to the workers' capacity and to the bytes of the answers.

    All but the number is shared fairly between clients. ``max_response_bytes`` is the limit of one answer.
    """

    def __init__(self, capacity: Capacity, *, max_requests: int, max_response_bytes: int) -> None:
        self._max_requests = max_requests
        self._requests = 0
        self._tokens = Budget(capacity.tokens)
        self._units = Budget(capacity.units)
        self._response_bytes = Budget(lambda: RESPONSES_IN_FLIGHT * max_response_bytes)
        self._typical = _FIRST_GUESS

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def tokens(self) -> int:
        """Tokens in flight."""
        return self._tokens.used

    @property
    def units(self) -> int:
        """What the vision stage has to do, in flight."""
        return self._units.used

    @property
    def response_bytes(self) -> int:
        """Bytes of the answers to what is in flight."""
        return self._response_bytes.used

    def enter(self, client: str, body_bytes: int | None = None) -> Ticket:
        """Admit a request; raises ``Overloaded`` when the service is full.

        Until ``Ticket.charge`` it counts as what the last requests cost, or as what its body could hold at
        most.
        """
        if self._requests >= self._max_requests:
            raise Overloaded(f"{self._requests} requests are being answered already", retry_after=1.0)
        guess = int(self._typical)
        if body_bytes is not None:
            guess = min(guess, body_bytes // _BYTES_PER_TOKEN)
        self._check(self._tokens, client, guess, "tokens")
        self._requests += 1
        return Ticket(self, client, guess)

    def _check(self, budget: Budget, client: str, amount: int, unit: str) -> None:
        if not budget.admits(client, amount):
            raise Overloaded(
                f"the service is full ({budget.used} of {budget.limit} {unit} in flight)", retry_after=1.0
            )


def _share(budget: Budget, amount: int) -> int:
    # A worker lets a request have a quarter of its queue waiting at a time, however large the request is.
    return min(amount, budget.limit // 4)


class Ticket:
    """One request's place, until it is closed."""

    def __init__(self, admission: Admission, client: str, guess: int) -> None:
        self._admission = admission
        self._client = client
        self._tokens = guess
        self._units = 0
        self._response_bytes = 0
        admission._tokens.take(client, guess)

    def charge(self, tokens: int, units: int, response_bytes: int) -> None:
        """Replace the guess by the request's cost; raises ``Overloaded`` when that is too much now."""
        admission = self._admission
        admission._typical += _WEIGHT * (tokens - admission._typical)
        admission._tokens.give(self._client, self._tokens)
        self._tokens = 0
        tokens, units = _share(admission._tokens, tokens), _share(admission._units, units)
        admission._check(admission._tokens, self._client, tokens, "tokens")
        if units:
            admission._check(admission._units, self._client, units, "units")
        admission._check(admission._response_bytes, self._client, response_bytes, "bytes of answers")
        admission._tokens.take(self._client, tokens)
        admission._units.take(self._client, units)
        admission._response_bytes.take(self._client, response_bytes)
        self._tokens, self._units, self._response_bytes = tokens, units, response_bytes

    def close(self) -> None:
        self._admission._requests -= 1
        self._admission._tokens.give(self._client, self._tokens)
        self._admission._units.give(self._client, self._units)
        self._admission._response_bytes.give(self._client, self._response_bytes)
