"""Counts what is in flight: rooms of models, and the tickets of the requests in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tessera.budgets import Budget
from tessera.errors import Overloaded
from tessera.frontend.group import (
    HELD_ALL_REQUESTS,
    HELD_BODY_BYTES,
    HELD_BYTES,
    HELD_REQUESTS,
    HELD_TOKENS,
    HELD_UNITS,
    FrontendGroup,
    model_entry,
)
from tessera.rpc import Peers

# What a request is taken to cost before any of its kind was known. Of those of its kind that were, the
# first ones count alike and later ones fade: the guess is right after one of them, and again after ten when
# they have changed.
_FIRST_GUESS: Final = 64.0
_LEAST_WEIGHT: Final = 0.125

# Of text, roughly; an image has many more.
_BYTES_PER_TOKEN: Final = 4


class _Costs:
    """Learns what requests cost in tokens: a moving average for bodies of about one length, or of none known.

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
    """Return the kind of a body; those of one kind differ in length by less than a factor of two."""
    # A length that no server takes is what a client says, and must not make kinds without end.
    return -1 if body_bytes is None else min(64, body_bytes.bit_length())


RESPONSES_IN_FLIGHT: Final = 16
"""How many answers of the largest size may be under way at a time."""


class Capacity:
    """Sums the tokens and units that the workers together take from here at a time, by their own account.

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
    """Finds where the table has what all, and each client, hold of ``owner``, in every slot."""

    def __init__(self, group: FrontendGroup, owner: str) -> None:
        self._group = group
        self._owner = owner
        self._epoch = group.epoch
        self._by_client: dict[str, tuple[int, list[int]]] = {}

    def find(self, client: str) -> tuple[int, list[int]]:
        """Return the places of a client, or of all for "": in the own slot, in the others."""
        if self._epoch != self._group.epoch:
            self._by_client.clear()
            self._epoch = self._group.epoch
        places = self._by_client.get(client)
        if places is None:
            name = model_entry(self._owner, client)
            others = self._group.places(name, self._group.others)
            places = self._by_client[client] = self._group.place(name), others
        return places

    def clients(self) -> list[str]:
        """Return the named clients of this frontend's requests."""
        return [client for client in self._by_client if client]


class GroupBudget(Budget):
    """Keeps a budget's counts in the table: ``word`` of the entries of all, and of each client.

    ``unit`` is the noun of errors. Two frontends that admit at the same instant do not see each other.
    """

    __slots__ = ("_group", "_places", "_unit", "_word")

    def __init__(
        self, limit: Callable[[], int], group: FrontendGroup, places: _Places, word: int, unit: str
    ) -> None:
        super().__init__(limit)
        self._group = group
        self._places = places
        self._word = word
        self._unit = unit

    @property
    def used(self) -> int:
        return self.held("")

    @property
    def own(self) -> int:
        """Return what this frontend has in use."""
        return self._group.words[self._places.find("")[0] + self._word]

    def held(self, client: str) -> int:
        words, word = self._group.words, self._word
        own, others = self._places.find(client)
        total = words[own + word]
        for at in others:
            total += words[at + word]
        return total

    def largest(self) -> int:
        return max(map(self.held, self._places.clients()), default=0)

    def admits(self, client: str, amount: int) -> bool:
        # Nobody is refused for what a frontend held that has ended.
        return super().admits(client, amount) or (self._group.look() and super().admits(client, amount))

    def overloaded(self, client: str, amount: int) -> Overloaded:
        """Return the error for an amount that is not admitted."""
        message = self.refusal(client, amount, whole="the service", unit=f"{self._unit} in flight")
        return Overloaded(message, retry_after=1.0)

    def check(self, client: str, amount: int) -> None:
        """Raise ``Overloaded`` for an amount that is not admitted."""
        if not self.admits(client, amount):
            raise self.overloaded(client, amount)

    def share(self, amount: int) -> int:
        """Bound an amount as a worker does: a quarter of its queue waits for one request at most."""
        return min(amount, self.limit // 4)

    def take(self, client: str, amount: int) -> None:
        words, word, find = self._group.words, self._word, self._places.find
        words[find("")[0] + word] += amount
        if client:
            words[find(client)[0] + word] += amount


BODY_BYTES: Final = 512 << 20
"""Bytes that the bodies of all requests may have at a time, until they are parsed."""


class Bodies(GroupBudget):
    """Keeps the bytes of bodies, as they are announced or come, until they are parsed."""

    __slots__ = ("count_refusal",)

    def __init__(self, limit: int, group: FrontendGroup, places: _Places) -> None:
        super().__init__(lambda: limit, group, places, HELD_BODY_BYTES, "bytes of bodies")
        self.count_refusal: Callable[[], None] = lambda: None

    def hold(self, client: str, nbytes: int) -> None:
        """Take room for bytes that are not read yet; raises ``Overloaded`` where there is none."""
        if not self.admits(client, nbytes):
            self.count_refusal()
            raise self.overloaded(client, nbytes)
        self.take(client, nbytes)


class Room:
    """Bounds what the requests for one model have in flight, by its workers' capacity and by a number.

    Requests, tokens and units are shared fairly between clients. ``pairs`` says that the model scores pairs;
    ``costs`` learns what requests cost. What the frontends of a ``group`` have in flight counts together.
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
        group = group or FrontendGroup()
        places = _Places(group, model)
        self._requests = GroupBudget(lambda: max_requests, group, places, HELD_REQUESTS, "requests")
        self._tokens = GroupBudget(capacity.tokens, group, places, HELD_TOKENS, "tokens")
        self._units = GroupBudget(capacity.units, group, places, HELD_UNITS, "units")
        self.costs = _Costs(pairs=pairs)

    @property
    def tokens(self) -> int:
        """Return the tokens in flight."""
        return self._tokens.used

    @property
    def units(self) -> int:
        """Return the units of the vision stage in flight."""
        return self._units.used

    @property
    def requests(self) -> int:
        """Return the requests in flight."""
        return self._requests.used

    def refusal(self, client: str, body_bytes: int | None) -> Overloaded | None:
        """Return the error that ``enter`` would raise now."""
        if not self._requests.admits(client, 1):
            return _too_many(self._requests, client)
        guess = self._guess(body_bytes)
        return None if self._tokens.admits(client, guess) else self._tokens.overloaded(client, guess)

    def enter(self, client: str, body_bytes: int | None) -> int:
        """Take a place for a request; raises ``Overloaded`` when the room is full.

        Returns the tokens that it holds until its cost is known: what the last requests with bodies of about
        this length cost, or, but for pairs, what such a body could hold at most.
        """
        if (refusal := self.refusal(client, body_bytes)) is not None:
            raise refusal
        guess = self._guess(body_bytes)
        self._requests.take(client, 1)
        self._tokens.take(client, guess)
        return guess

    def leave(self, client: str, tokens: int, units: int) -> None:
        """Give a request's place and all that it holds back."""
        self._requests.give(client, 1)
        self._tokens.give(client, tokens)
        if units:
            self._units.give(client, units)

    def charge(self, client: str, guess: int, tokens: int, units: int) -> tuple[int, int]:
        """Let a request hold its tokens and units, which are returned, in place of the tokens of its guess.

        Raises ``Overloaded``, and the request holds nothing, when that is too much now.
        """
        self._tokens.give(client, guess)
        tokens, units = self._tokens.share(tokens), self._units.share(units)
        self._tokens.check(client, tokens)
        if units:
            self._units.check(client, units)
            self._units.take(client, units)
        self._tokens.take(client, tokens)
        return tokens, units

    def _guess(self, body_bytes: int | None) -> int:
        return self._tokens.share(self.costs.guess(body_bytes))


class Admission:
    """Admits requests up to a number, to the models' ``Room`` and to the bytes of the answers.

    The head of a request says nothing of its model: where there are several it is let in as long as one of
    them has room for such a request, so that a flood of requests for one does not turn those for another
    away. Requests, and bytes of answers and of ``bodies``, are shared by all models, fairly between clients.
    ``max_requests`` is a model's. ``max_response_bytes`` is the limit of one answer, ``body_bytes`` that of
    all bodies.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_response_bytes: int,
        body_bytes: int = BODY_BYTES,
        group: FrontendGroup | None = None,
    ) -> None:
        self._group = group = group or FrontendGroup()
        places = _Places(group, "")
        self._max_requests = max_requests
        self._rooms: list[Room] = []
        self.answers = GroupBudget(
            lambda: RESPONSES_IN_FLIGHT * max_response_bytes,
            group,
            places,
            HELD_BYTES,
            "bytes of answers",
        )
        self.bodies = Bodies(body_bytes, group, places)
        self._all = GroupBudget(
            lambda: max_requests * max(1, len(self._rooms)), group, places, HELD_ALL_REQUESTS, "requests"
        )

    def open_room(self, model: str, capacity: Capacity, *, pairs: bool = False) -> Room:
        """Open a room for a model's requests, until it is closed; ``pairs`` as in ``Room``."""
        room = Room(model, capacity, max_requests=self._max_requests, pairs=pairs, group=self._group)
        self._rooms.append(room)
        return room

    def close_room(self, room: Room) -> None:
        """Let nothing in for a room's sake any more; what is in it stays until it is done."""
        self._rooms.remove(room)

    @property
    def requests(self) -> int:
        """Return the requests in flight."""
        return self._all.used

    @property
    def response_bytes(self) -> int:
        """Return the bytes of the answers to what is in flight."""
        return self.answers.used

    def refusal(self, client: str, body_bytes: int | None = None) -> Overloaded | None:
        """Return the error that ``enter`` would raise now."""
        if len(self._rooms) != 1 and not self._all.admits(client, 1):
            return _too_many(self._all, client)
        first: Overloaded | None = None
        for room in self._rooms:
            if (refusal := room.refusal(client, body_bytes)) is None:
                return None
            first = first or refusal
        return first

    def enter(self, client: str, body_bytes: int | None = None) -> Ticket:
        """Admit a request; raises ``Overloaded`` when the service is full.

        With one model it enters that one's room at once.
        """
        ticket = Ticket(self, client, body_bytes)
        if len(self._rooms) == 1:
            ticket.enter(self._rooms[0])
        elif (refusal := self.refusal(client, body_bytes)) is not None:
            raise refusal
        self._all.take(client, 1)
        return ticket

    def leave(self, client: str) -> None:
        """Count a request no more."""
        self._all.give(client, 1)


def too_many(limit: int) -> Overloaded:
    """Return the error of a request beyond the number that may be in flight."""
    return Overloaded(f"the service is full (limit: {limit} requests in flight)", retry_after=1.0)


def _too_many(requests: GroupBudget, client: str) -> Overloaded:
    """Return the error of a request beyond the number of all, or beyond its client's share."""
    full = requests.used >= requests.limit
    return too_many(requests.limit) if full else requests.overloaded(client, 1)


@dataclass(slots=True, eq=False)
class Ticket:
    """Holds one request's place, until it is closed."""

    _admission: Admission
    _client: str
    _body_bytes: int | None
    _room: Room | None = None
    _tokens: int = 0
    _units: int = 0
    _response_bytes: int = 0

    def enter(self, room: Room) -> None:
        """Take a place in the room of the request's model; raises ``Overloaded`` when it is full."""
        if room is not self._room:
            guess = room.enter(self._client, self._body_bytes)
            self._leave()
            self._room, self._tokens = room, guess

    def _leave(self) -> None:
        if self._room is not None:
            self._room.leave(self._client, self._tokens, self._units)
            self._room, self._tokens, self._units = None, 0, 0

    def charge(self, tokens: int, units: int, response_bytes: int) -> None:
        """Replace the guess by the request's cost; raises ``Overloaded`` when that is too much now.

        The request has entered its model's room.
        """
        room, client = self._room, self._client
        assert room is not None
        room.costs.learn(self._body_bytes, tokens)
        guess, self._tokens = self._tokens, 0
        self._tokens, self._units = room.charge(client, guess, tokens, units)
        self.take(response_bytes - self._response_bytes)

    def take(self, response_bytes: int) -> None:
        """Take more bytes of the answer; raises ``Overloaded`` when all answers have too many."""
        answers = self._admission.answers
        answers.check(self._client, response_bytes)
        answers.take(self._client, response_bytes)
        self._response_bytes += response_bytes

    def answered(self) -> None:
        """Give the place in the room back; the bytes of the answer stay taken until it has been read."""
        self._leave()

    def close(self) -> None:
        self._leave()
        self._admission.leave(self._client)
        if self._response_bytes:
            self._admission.answers.give(self._client, self._response_bytes)
