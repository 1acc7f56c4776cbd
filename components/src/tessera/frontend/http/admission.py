"""How much work the frontend admits at a time, and how much one API key may use per minute."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from tessera.budgets import Budget, Clock
from tessera.errors import Overloaded, RateLimited
from tessera.frontend.group import (
    HELD_BYTES,
    HELD_REQUESTS,
    HELD_TOKENS,
    HELD_UNITS,
    REQUEST_RATE,
    REQUESTS,
    TOKEN_RATE,
    FrontendGroup,
    model_entry,
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


class _Places:
    """Where it stands what all, and each client, hold of ``owner``, in the own slot and the others'."""

    def __init__(self, group: FrontendGroup, owner: str) -> None:
        self._group = group
        self._owner = owner
        self._epoch = group.epoch
        self._found: dict[str, tuple[int, list[int]]] = {}

    def find(self, client: str) -> tuple[int, list[int]]:
        """Those of a client; of "" those of all."""
        if self._epoch != self._group.epoch:
            self._found.clear()
            self._epoch = self._group.epoch
        found = self._found.get(client)
        if found is None:
            name = model_entry(self._owner, client)
            others = self._group.places(name, self._group.others)
            found = self._found[client] = self._group.place(name), others
        return found


class _GroupBudget(Budget):
    """A budget whose counts are in the table: ``word`` of the entries of all, and of each client."""

    __slots__ = ("_group", "_places", "_word")

    def __init__(self, limit: Callable[[], int], group: FrontendGroup, places: _Places, word: int) -> None:
        super().__init__(limit)
        self._group = group
        self._places = places
        self._word = word

    @property
    def used(self) -> int:
        return self.held("")

    def held(self, client: str) -> int:
        words, word = self._group.words, self._word
        own, others = self._places.find(client)
        total = words[own + word]
        for at in others:
            total += words[at + word]
        return total

    def admits(self, client: str, amount: int) -> bool:
        # Nobody is refused for what a frontend held that has ended.
        return super().admits(client, amount) or (self._group.look() and super().admits(client, amount))

    def take(self, client: str, amount: int) -> None:
        words, word, find = self._group.words, self._word, self._places.find
        words[find("")[0] + word] += amount
        if client:
            words[find(client)[0] + word] += amount

    def give(self, client: str, amount: int) -> None:
        self.take(client, -amount)


class Room:
    """What the requests for one model have in flight, up to its workers' capacity and to a number of them.

    Tokens and units are shared fairly between clients. ``pairs`` says that the model scores pairs. What the
    frontends of a ``group`` have in flight counts together; two of them that admit at the same instant do
    not see each other.
    """

    def __init__(
        self,
        model: str,
        capacity: Capacity,
        *,
        max_requests: int,
        pairs: bool = False,
        group: FrontendGroup | None = None,
    ) -> None:
        self.model = model
        self._group = group = group or FrontendGroup()
        self._places = places = _Places(group, model)
        self._max_requests = max_requests
        self._tokens = _GroupBudget(capacity.tokens, group, places, HELD_TOKENS)
        self._units = _GroupBudget(capacity.units, group, places, HELD_UNITS)
        self._costs = _Costs(pairs=pairs)
        self._here = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def tokens(self) -> int:
        """Tokens in flight."""
        return self._tokens.used

    @property
    def units(self) -> int:
        """What the vision stage has to do, in flight."""
        return self._units.used

    async def empty(self) -> None:
        """Wait until this frontend has no request for the model in flight."""
        await self._empty.wait()

    def _guess(self, body_bytes: int | None) -> int:
        return _share(self._tokens, self._costs.guess(body_bytes))

    @property
    def requests(self) -> int:
        """Requests in flight."""
        own, others = self._places.find("")
        words = self._group.words
        total: int = words[own + HELD_REQUESTS]
        for at in others:
            total += words[at + HELD_REQUESTS]
        return total

    def _is_full(self) -> bool:
        most = self._max_requests
        return self.requests >= most and not (self._group.look() and self.requests < most)

    def _admits(self, client: str, guess: int) -> bool:
        return not self._is_full() and self._tokens.admits(client, guess)

    def _refusal(self, client: str, guess: int) -> Overloaded:
        if self._is_full():
            return _too_many(self.requests)
        return _full(self._tokens, client, guess, "tokens")

    def _change(self, client: str, *, tokens: int, units: int = 0, requests: int = 0) -> None:
        words, find = self._group.words, self._places.find
        at = find("")[0]
        words[at + HELD_TOKENS] += tokens
        words[at + HELD_UNITS] += units
        words[at + HELD_REQUESTS] += requests
        if client:
            at = find(client)[0]
            words[at + HELD_TOKENS] += tokens
            words[at + HELD_UNITS] += units
        if requests:
            self._here += requests
            if not self._here:
                self._empty.set()
            else:
                self._empty.clear()


class Admission:
    """Admits requests up to a number, to the models' ``Room`` and to the bytes of the answers.

    The head of a request says nothing of its model: where there are several it is let in as long as one of
    them has room for such a request, so that a flood of requests for one does not turn those for another
    away. Bytes of answers are shared fairly between clients, and by all models. ``max_requests`` is a
    model's. ``max_response_bytes`` is the limit of one answer.
    """

    def __init__(
        self, *, max_requests: int, max_response_bytes: int, group: FrontendGroup | None = None
    ) -> None:
        self._group = group = group or FrontendGroup()
        self._max_requests = max_requests
        self._rooms: list[Room] = []
        self._response_bytes = _GroupBudget(
            lambda: RESPONSES_IN_FLIGHT * max_response_bytes, group, _Places(group, ""), HELD_BYTES
        )

    def open_room(self, model: str, capacity: Capacity, *, pairs: bool = False) -> Room:
        """Room for a model's requests, until it is closed; ``pairs`` says that the model scores pairs."""
        room = Room(model, capacity, max_requests=self._max_requests, pairs=pairs, group=self._group)
        self._rooms.append(room)
        return room

    def close_room(self, room: Room) -> None:
        """Nothing is let in for its sake any more; what is in it stays until it is done."""
        self._rooms.remove(room)

    @property
    def requests(self) -> int:
        """Requests in flight."""
        words, total = self._group.words, self._group.words[self._group.base + REQUESTS]
        for slot in self._group.others:
            total += words[slot + REQUESTS]
        return total

    def _is_full(self) -> bool:
        most = self._max_requests * max(1, len(self._rooms))
        return self.requests >= most and not (self._group.look() and self.requests < most)

    def _count(self, requests: int) -> None:
        self._group.words[self._group.base + REQUESTS] += requests

    @property
    def response_bytes(self) -> int:
        """Bytes of the answers to what is in flight."""
        return self._response_bytes.used

    def refusal(self, client: str, body_bytes: int | None = None) -> Overloaded | None:
        """What ``enter`` would raise now."""
        if self._is_full():
            return _too_many(self.requests)
        if not self._rooms or any(room._admits(client, room._guess(body_bytes)) for room in self._rooms):
            return None
        return self._rooms[0]._refusal(client, self._rooms[0]._guess(body_bytes))

    def enter(self, client: str, body_bytes: int | None = None) -> Ticket:
        """Admit a request; raises ``Overloaded`` when the service is full.

        With one model it enters that one's room at once.
        """
        if self._is_full():
            raise _too_many(self.requests)
        ticket = Ticket(self, client, body_bytes)
        if len(self._rooms) == 1:
            ticket.enter(self._rooms[0])
        elif self._rooms and not any(room._admits(client, room._guess(body_bytes)) for room in self._rooms):
            raise self._rooms[0]._refusal(client, self._rooms[0]._guess(body_bytes))
        self._count(1)
        return ticket


def _too_many(requests: int) -> Overloaded:
    return Overloaded(f"{requests} requests are being answered already", retry_after=1.0)


def _full(budget: Budget, client: str, amount: int, unit: str) -> Overloaded:
    said = budget.refusal(client, amount, whole="the service", unit=f"{unit} in flight")
    return Overloaded(said, retry_after=1.0)


def _check(budget: Budget, client: str, amount: int, unit: str) -> None:
    if not budget.admits(client, amount):
        raise _full(budget, client, amount, unit)


def _share(budget: Budget, amount: int) -> int:
    # A worker lets a request have a quarter of its queue waiting at a time, however large the request is.
    return min(amount, budget.limit // 4)


class Ticket:
    """One request's place, until it is closed."""

    def __init__(self, admission: Admission, client: str, body_bytes: int | None) -> None:
        self._admission = admission
        self._client = client
        self._body_bytes = body_bytes
        self._room: Room | None = None
        self._tokens = 0
        self._units = 0
        self._response_bytes = 0

    def enter(self, room: Room) -> None:
        """Take a place in the room of the request's model; raises ``Overloaded`` when it is full.

        Until ``charge`` it counts as what the last requests with bodies of about this length cost, or, but
        for pairs, as what such a body could hold at most.
        """
        if room is self._room:
            return
        guess = room._guess(self._body_bytes)
        if not room._admits(self._client, guess):
            raise room._refusal(self._client, guess)
        self._leave()
        room._change(self._client, tokens=guess, requests=1)
        self._room, self._tokens = room, guess

    def _leave(self) -> None:
        if self._room is not None:
            self._room._change(self._client, tokens=-self._tokens, units=-self._units, requests=-1)
            self._room, self._tokens, self._units = None, 0, 0

    def charge(self, tokens: int, units: int, response_bytes: int) -> None:
        """Replace the guess by the request's cost; raises ``Overloaded`` when that is too much now.

        The request has entered its model's room.
        """
        room, answers, client = self._room, self._admission._response_bytes, self._client
        assert room is not None
        room._costs.learn(self._body_bytes, tokens)
        room._change(client, tokens=-self._tokens)
        self._tokens = 0
        tokens, units = _share(room._tokens, tokens), _share(room._units, units)
        _check(room._tokens, client, tokens, "tokens")
        if units:
            _check(room._units, client, units, "units")
        _check(answers, client, response_bytes, "bytes of answers")
        room._change(client, tokens=tokens, units=units)
        answers.take(client, response_bytes)
        self._tokens, self._units, self._response_bytes = tokens, units, response_bytes

    def close(self) -> None:
        self._leave()
        self._admission._count(-1)
        if self._response_bytes:
            self._admission._response_bytes.give(self._client, self._response_bytes)
