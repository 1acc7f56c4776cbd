"""How much work the frontend admits at a time, and how much one API key may use per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from tessera.budgets import Budget, Clock
from tessera.errors import Overloaded, RateLimited
from tessera.frontend.group import (
    HELD_BYTES,
    HELD_TOKENS,
    HELD_UNITS,
    REQUEST_RATE,
    REQUESTS,
    RESPONSE_BYTES,
    TOKEN_RATE,
    TOKENS,
    UNITS,
    FrontendGroup,
)
from tessera.rpc import Peers


class _Rate:
    """A token bucket that all frontends of a group take from: a minute's worth, and perhaps a debt.

    Each writes what it has taken, and with that a record of the whole bucket as it found it. Whoever asks
    goes on from the newest record, less what others have taken since. No take is lost; two at the same
    instant may both find the last token.
    """

    def __init__(
        self, group: FrontendGroup, name: str, word: int, per_minute: float, clock: Clock = time.monotonic
    ) -> None:
        self._group = group
        self._name = name
        self._word = word
        self._capacity = per_minute
        self._per_second = per_minute / 60
        self._clock = clock
        self._own = group.place(name) + word
        self._places: list[int] = []
        self._epoch = -1

    def wait(self, amount: float = 0.0) -> float:
        """Seconds until more than nothing, and as much as ``amount`` or a full bucket, is there; 0 if now."""
        level, _ = self._look(self._clock())
        if level > 0 and level >= min(amount, self._capacity):
            return 0.0
        return max(0.001, (amount - level) / self._per_second)

    def take(self, amount: float) -> None:
        """Take ``amount`` even if that is more than there is."""
        now = self._clock()
        level, taken = self._look(now)
        words, reals, own = self._group.words, self._group.reals, self._own
        words[own] += 1
        reals[own + 1] += amount
        reals[own + 2] = taken + amount
        reals[own + 3] = level - amount
        reals[own + 4] = now
        words[own] += 1

    def _look(self, now: float) -> tuple[float, float]:
        """The bucket's level, and what has ever been taken from it."""
        group = self._group
        if self._epoch != group.epoch:
            # What a frontend took that is not there any more stays taken.
            others = group.places(self._name, group.siblings)
            self._places = [self._own, *(at + self._word for at in others)]
            self._epoch = group.epoch
        words, reals = group.words, group.reals
        taken, newest, level, seen = 0.0, -math.inf, self._capacity, None
        for at in self._places:
            version, own = words[at], reals[at + 1]
            found, left, when = reals[at + 2], reals[at + 3], reals[at + 4]
            taken += own
            # One that is being written is passed over: an older one says the same.
            if when > newest and version and not version % 2 and words[at] == version:
                newest, level, seen = when, left, found
        if seen is None:
            return self._capacity, taken
        refilled = level + max(0.0, now - newest) * self._per_second
        return min(self._capacity, refilled) - max(0.0, taken - seen), taken


class RateLimiter:
    """Two buckets for each key, of a minute's worth, that its ``group`` shares; a rate of 0 sets no limit.

    Owned by one event loop.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        requests_per_minute: float = 0.0,
        tokens_per_minute: float = 0.0,
        clock: Clock = time.monotonic,
        group: FrontendGroup | None = None,
    ) -> None:
        group = group or FrontendGroup()

        def rates(word: int, per_minute: float) -> dict[str, _Rate]:
            return {name: _Rate(group, name, word, per_minute, clock) for name in names if per_minute}

        self._requests = rates(REQUEST_RATE, requests_per_minute)
        self._tokens = rates(TOKEN_RATE, tokens_per_minute)

    def admit(self, name: str) -> None:
        """Count a request; raises ``RateLimited`` when it is one too many, or tokens are owed."""
        requests = self._requests.get(name)
        if requests is not None and (wait := requests.wait(1.0)):
            raise RateLimited("this API key has used up its requests per minute", retry_after=wait)
        self._check_tokens(name)
        if requests is not None:
            requests.take(1.0)

    def charge(self, name: str, tokens: int) -> None:
        """Count a request's tokens, which are known once it has been tokenised.

        Raises ``RateLimited`` when there are none left. A request larger than what is left is let through
        and leaves a debt; otherwise one larger than a minute's worth could never be sent.
        """
        self._check_tokens(name)
        if (bucket := self._tokens.get(name)) is not None:
            bucket.take(tokens)

    def _check_tokens(self, name: str) -> None:
        if (bucket := self._tokens.get(name)) is not None and (wait := bucket.wait()):
            raise RateLimited("this API key has used up its tokens per minute", retry_after=wait)


# What a request is taken to cost before any of its kind was known. Of those of its kind that were, the
# first ones count alike and later ones fade: the guess is right after one of them, and again after ten when
# they have changed.
_FIRST_GUESS: Final = 64.0
_LEAST_WEIGHT: Final = 0.125

# Of text, roughly; an image has many more.
_BYTES_PER_TOKEN: Final = 4


class _Costs:
    """What requests cost in tokens: a moving average for bodies of about one length, or of no known one.

    A single one would take a short text for an image, and an image for a text, whenever both are sent. Where
    ``pairs`` are scored a body has many more tokens than its length says: its query is in each of them.
    """

    def __init__(self, *, pairs: bool) -> None:
        self._pairs = pairs
        self._means: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def guess(self, body_bytes: int | None) -> int:
        kind = _kind(body_bytes)
        guess = int(self._means.get(kind, _FIRST_GUESS))
        if body_bytes is None or self._pairs:
            return guess
        return min(guess, body_bytes // _BYTES_PER_TOKEN)

    def learn(self, body_bytes: int | None, tokens: int) -> None:
        kind = _kind(body_bytes)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        mean = self._means.get(kind, 0.0)
        self._means[kind] = mean + max(_LEAST_WEIGHT, 1 / count) * (tokens - mean)


def _kind(body_bytes: int | None) -> int:
    """Bodies of one kind differ in length by less than a factor of two."""
    # A length that no server takes is what a client says, and must not make kinds without end.
    return -1 if body_bytes is None else min(64, body_bytes.bit_length())


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


class _Clients:
    """Where each client's words are in the table, in the own slot and in those of the others."""

    def __init__(self, group: FrontendGroup) -> None:
        self._group = group
        self._epoch = group.epoch
        self._found: dict[str, tuple[int, list[int]]] = {}

    def find(self, client: str) -> tuple[int, list[int]]:
        if self._epoch != self._group.epoch:
            self._found.clear()
            self._epoch = self._group.epoch
        found = self._found.get(client)
        if found is None:
            others = self._group.places(client, self._group.others)
            found = self._found[client] = self._group.place(client), others
        return found


class _GroupBudget(Budget):
    """A budget whose counts are in the table: ``word`` is that of all clients, ``held`` that of each."""

    __slots__ = ("_clients", "_group", "_own", "_share", "_word")

    def __init__(
        self, limit: Callable[[], int], group: FrontendGroup, clients: _Clients, word: int, held: int
    ) -> None:
        super().__init__(limit)
        self._group = group
        self._clients = clients
        self._own = group.base + word
        self._word = word
        self._share = held

    @property
    def used(self) -> int:
        words, word = self._group.words, self._word
        total = words[self._own]
        for slot in self._group.others:
            total += words[slot + word]
        return total

    def held(self, client: str) -> int:
        words, share = self._group.words, self._share
        own, others = self._clients.find(client)
        total = words[own + share]
        for at in others:
            total += words[at + share]
        return total

    def admits(self, client: str, amount: int) -> bool:
        # Nobody is refused for what a frontend held that has ended.
        return super().admits(client, amount) or (self._group.look() and super().admits(client, amount))

    def take(self, client: str, amount: int) -> None:
        words = self._group.words
        words[self._own] += amount
        if client:
            words[self._clients.find(client)[0] + self._share] += amount

    def give(self, client: str, amount: int) -> None:
        self.take(client, -amount)


class Admission:
    """Admits requests up to a number, to the workers' capacity and to the bytes of the answers.

    All but the number is shared fairly between clients. What the frontends of a ``group`` have in flight
    counts together; two of them that admit at the same instant do not see each other. ``max_response_bytes``
    is the limit of one answer. ``pairs`` says that the model scores pairs.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        max_requests: int,
        max_response_bytes: int,
        pairs: bool = False,
        group: FrontendGroup | None = None,
    ) -> None:
        self._group = group = group or FrontendGroup()
        self._max_requests = max_requests
        clients = _Clients(group)
        self._tokens = _GroupBudget(capacity.tokens, group, clients, TOKENS, HELD_TOKENS)
        self._units = _GroupBudget(capacity.units, group, clients, UNITS, HELD_UNITS)
        self._response_bytes = _GroupBudget(
            lambda: RESPONSES_IN_FLIGHT * max_response_bytes, group, clients, RESPONSE_BYTES, HELD_BYTES
        )
        self._costs = _Costs(pairs=pairs)

    @property
    def requests(self) -> int:
        """Requests in flight."""
        words, total = self._group.words, self._group.words[self._group.base + REQUESTS]
        for slot in self._group.others:
            total += words[slot + REQUESTS]
        return total

    def _is_full(self) -> bool:
        return self.requests >= self._max_requests and not (
            self._group.look() and self.requests < self._max_requests
        )

    def _count(self, requests: int) -> None:
        self._group.words[self._group.base + REQUESTS] += requests

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

        Until ``Ticket.charge`` it counts as what the last requests with bodies of about ``body_bytes`` cost,
        or, but for pairs, as what such a body could hold at most.
        """
        if self._is_full():
            raise Overloaded(f"{self.requests} requests are being answered already", retry_after=1.0)
        guess = _share(self._tokens, self._costs.guess(body_bytes))
        self._check(self._tokens, client, guess, "tokens")
        self._count(1)
        return Ticket(self, client, guess, body_bytes)

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

    def __init__(self, admission: Admission, client: str, guess: int, body_bytes: int | None) -> None:
        self._admission = admission
        self._client = client
        self._body_bytes = body_bytes
        self._tokens = guess
        self._units = 0
        self._response_bytes = 0
        admission._tokens.take(client, guess)

    def charge(self, tokens: int, units: int, response_bytes: int) -> None:
        """Replace the guess by the request's cost; raises ``Overloaded`` when that is too much now."""
        admission = self._admission
        admission._costs.learn(self._body_bytes, tokens)
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
        self._admission._count(-1)
        self._admission._tokens.give(self._client, self._tokens)
        self._admission._units.give(self._client, self._units)
        self._admission._response_bytes.give(self._client, self._response_bytes)
