"""Limits what one API key may use per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from tessera.budgets import Clock
from tessera.errors import RateLimited
from tessera.frontend.group import REQUEST_RATE, TOKEN_RATE, FrontendGroup


class Rate:
    """Keeps a token bucket that all frontends of a group take from: a minute's worth, and perhaps a debt.

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
        """Return seconds until more than nothing, and ``amount`` or a full bucket, is there; 0 if now."""
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
        """Return the bucket's level, and what has ever been taken from it."""
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
            sum_then, left, when = reals[at + 2], reals[at + 3], reals[at + 4]
            taken += own
            # One that is being written is passed over: an older one says the same.
            if when > newest and version and not version % 2 and words[at] == version:
                newest, level, seen = when, left, sum_then
        if seen is None:
            return self._capacity, taken
        refilled = level + max(0.0, now - newest) * self._per_second
        return min(self._capacity, refilled) - max(0.0, taken - seen), taken


class RateLimiter:
    """Keeps two buckets for each key, of a minute's worth, that its ``group`` shares; a rate of 0 is none.

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

        def rates(word: int, per_minute: float) -> dict[str, Rate]:
            return {name: Rate(group, name, word, per_minute, clock) for name in names if per_minute}

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
