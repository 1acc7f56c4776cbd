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

    A single one would take a short text for an image, and an image for a text, whenever both are sent. A
    guess is no more than a body of that length could hold. Where ``pairs`` are scored it has many more tokens
    than its length says: its query is in each of them.
    """

    def __init__(self, *, pairs: bool) -> None:
        self._pairs = pairs
        # By kind, how many were learned of and their mean.
        self._seen: dict[int, tuple[int, float]] = {}

    def guess(self, body_bytes: int | None) -> int:
        guess = int(self._seen.get(_kind(body_bytes), (0, _FIRST_GUESS))[1])
        return guess if body_bytes is None or self._pairs else min(guess, body_bytes // _BYTES_PER_TOKEN)

    def learn(self, body_bytes: int | None, tokens: int) -> None:
        kind = _kind(body_bytes)
        count, mean = self._seen.get(kind, (0, 0.0))
        self._seen[kind] = count + 1, mean + max(_LEAST_WEIGHT, 1 / (count + 1)) * (tokens - mean)


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
        self.tokens, self.units = _lasting(tokens, unknown), _lasting(units, unknown)

    @classmethod
    def of_workers(cls, embed: Peers, encode: Peers, *, unknown: int) -> Capacity:
        return cls(
            lambda: sum(info.tokens for info in embed.ready.values()),
            # Aggregated workers encode for themselves.
            lambda: sum(info.units for info in (*embed.ready.values(), *encode.ready.values())),
            unknown=unknown,
        )


def _lasting(read: Callable[[], int], known: int) -> Callable[[], int]:
    """Return what reads a number, and goes on with the last one for as long as it is 0."""

    def last() -> int:
        nonlocal known
        known = read() or known
        return known

    return last


class _Places(dict[str, int]):
    """Has where the own slot of the table has what a client, or all for "", hold of ``owner``.

    A name keeps its place there for as long as this process runs.
    """

    def __init__(self, group: FrontendGroup, owner: str) -> None:
        super().__init__()
        self.group = group
        self._owner = owner
        self._epoch = group.epoch
        self._elsewhere: dict[str, list[int]] = {}

    def __missing__(self, client: str) -> int:
        place = self[client] = self.group.place(model_entry(self._owner, client))
        return place

    def elsewhere(self, client: str) -> list[int]:
        """Return the places of the same in the slots of the other frontends."""
        if self._epoch != self.group.epoch:
            self._elsewhere.clear()
            self._epoch = self.group.epoch
        places = self._elsewhere.get(client)
        if places is None:
            name = model_entry(self._owner, client)
            places = self._elsewhere[client] = self.group.places(name, self.group.others)
        return places


class GroupBudget(Budget):
    """Keeps a budget's counts in the table: ``word`` of the entries of all, and of each client.

    ``unit`` is the noun of errors. Two frontends that admit at the same instant do not see each other.
    """

    __slots__ = ("_places", "_word", "_words")

    def __init__(self, limit: Callable[[], int], places: _Places, word: int, unit: str) -> None:
        super().__init__(limit, unit=f"{unit} in flight")
        self._places = places
        self._words = places.group.words
        self._word = word

    @property
    def used(self) -> int:
        return self.held("")

    @property
    def own(self) -> int:
        """Return what this frontend has in use."""
        return self._words[self._places[""] + self._word]

    def held(self, client: str) -> int:
        words, word, places = self._words, self._word, self._places
        total = words[places[client] + word]
        if places.group.others:
            total += sum([words[at + word] for at in places.elsewhere(client)])
        return total

    def largest(self) -> int:
        return max([self.held(client) for client in self._places if client], default=0)

    def admits(self, client: str, amount: int) -> bool:
        # Nobody is refused for what a frontend held that has ended.
        return super().admits(client, amount) or (
            self._places.group.look() and super().admits(client, amount)
        )

    def share(self, amount: int) -> int:
        """Bound an amount as a worker does: a quarter of its queue waits for one request at most."""
        return min(amount, self.limit // 4)

    def take(self, client: str, amount: int) -> None:
        words, word, places = self._words, self._word, self._places
        words[places[""] + word] += amount
        if client:
            words[places[client] + word] += amount


BODY_BYTES: Final = 512 << 20
"""Bytes that the bodies of all requests, and images that they name, may have at a time."""


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
        places = _Places(group or FrontendGroup(), model)
        self.requests = GroupBudget(lambda: max_requests, places, HELD_REQUESTS, "requests")
        self.tokens = GroupBudget(capacity.tokens, places, HELD_TOKENS, "tokens")
        self.units = GroupBudget(capacity.units, places, HELD_UNITS, "units")
        self.costs = _Costs(pairs=pairs)

    def guess(self, body_bytes: int | None) -> int:
        """Return the tokens that a request holds until its cost is known."""
        return self.tokens.share(self.costs.guess(body_bytes))

    def refusal(self, client: str, body_bytes: int | None) -> Overloaded | None:
        """Return the error of another request, None where it has room."""
        if not self.requests.admits(client, 1):
            return self.requests.overloaded(client, 1)
        guess = self.guess(body_bytes)
        return None if self.tokens.admits(client, guess) else self.tokens.overloaded(client, guess)


class Admission:
    """Admits requests up to a number, to the models' ``Room`` and to the bytes of the answers.

    The head of a request says nothing of its model: where there are several it is let in as long as one of
    them has room for such a request, so that a flood of requests for one does not turn those for another
    away. Requests, and bytes of ``answers`` and of ``bodies``, are shared by all
    models, fairly between clients. ``max_requests`` is a model's. ``max_response_bytes`` is the limit of one
    answer, ``body_bytes`` that of all bodies.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_response_bytes: int,
        body_bytes: int = BODY_BYTES,
        group: FrontendGroup | None = None,
    ) -> None:
        self._group = group or FrontendGroup()
        self._max_requests = max_requests
        self._rooms: list[Room] = []
        places, answers = _Places(self._group, ""), RESPONSES_IN_FLIGHT * max_response_bytes
        self.answers = GroupBudget(lambda: answers, places, HELD_BYTES, "bytes of answers")
        self.bodies = GroupBudget(lambda: body_bytes, places, HELD_BODY_BYTES, "bytes of bodies")
        self.requests = GroupBudget(
            lambda: max_requests * max(1, len(self._rooms)), places, HELD_ALL_REQUESTS, "requests"
        )

    def open_room(self, model: str, capacity: Capacity, *, pairs: bool = False) -> Room:
        """Open a room for a model's requests, until it is closed; ``pairs`` as in ``Room``."""
        room = Room(model, capacity, max_requests=self._max_requests, pairs=pairs, group=self._group)
        self._rooms.append(room)
        return room

    def close_room(self, room: Room) -> None:
        """Let nothing in for a room's sake any more; what is in it stays until it is done."""
        self._rooms.remove(room)

    def refusal(self, client: str, body_bytes: int | None = None) -> Overloaded | None:
        """Return the error that ``enter`` would raise now."""
        if len(self._rooms) != 1 and not self.requests.admits(client, 1):
            return self.requests.overloaded(client, 1)
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
        self.requests.take(client, 1)
        return ticket


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
        if room is self._room:
            return
        if (refusal := room.refusal(self._client, self._body_bytes)) is not None:
            raise refusal
        self.leave_room()
        self._room, self._tokens = room, room.guess(self._body_bytes)
        room.requests.take(self._client, 1)
        room.tokens.take(self._client, self._tokens)

    def leave_room(self) -> None:
        """Give the place in the room back; the bytes of the answer stay taken until it has been read."""
        if (room := self._room) is not None:
            room.requests.give(self._client, 1)
            room.tokens.give(self._client, self._tokens)
            if self._units:
                room.units.give(self._client, self._units)
            self._room, self._tokens, self._units = None, 0, 0

    def charge(self, tokens: int, units: int, response_bytes: int) -> None:
        """Hold the request's cost in place of the guess; raises ``Overloaded`` when that is too much now.

        The request has entered its model's room.
        """
        room, client = self._room, self._client
        assert room is not None
        room.costs.learn(self._body_bytes, tokens)
        room.tokens.give(client, self._tokens)
        self._tokens, tokens, units = 0, room.tokens.share(tokens), room.units.share(units)
        room.tokens.check(client, tokens)
        if units:
            room.units.hold(client, units)
            self._units = units
        room.tokens.take(client, tokens)
        self._tokens = tokens
        self.take(response_bytes - self._response_bytes)

    def take(self, response_bytes: int) -> None:
        """Take more bytes of the answer; raises ``Overloaded`` when all answers have too many."""
        self._admission.answers.hold(self._client, response_bytes)
        self._response_bytes += response_bytes

    def close(self) -> None:
        self.leave_room()
        self._admission.requests.give(self._client, 1)
        if self._response_bytes:
            self._admission.answers.give(self._client, self._response_bytes)
