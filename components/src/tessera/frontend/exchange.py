"""Keeps one request of a client together with its answer, as every door has it."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec
from starlette.types import Scope

from tessera.budgets import Budget
from tessera.free_memory import free_aside
from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.admission.room import Ticket
from tessera.frontend.http.auth import ANONYMOUS
from tessera.frontend.http.errors import ErrorShape, Failure
from tessera.logs import RequestLine, note
from tessera.tasks import Deadline, Departure
from tessera.turns import Threads

T = TypeVar("T")

# It is echoed in a header and in logs, where a line break would forge another line.
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
# Seeded by the system once. To ask it for each id lets go of the interpreter: beside 2208cbcb, a frontend
# took 1.07 +- 0.04 of the processor time with 64 at once, and 0.97 +- 0.05 without.
_IDS: Final = random.Random()
os.register_at_fork(after_in_child=_IDS.seed)


class Exchange(msgspec.Struct, eq=False, kw_only=True):
    """Holds what is known of a request from its head to its answer; owned by one event loop.

    ``line`` has the request's id, which its body may set. ``headers`` has the first of each name, in lower
    case. ``body_bytes`` is the length that was announced, ``peer`` the client's address, ``key`` the name of
    the API key, also where there are none, and ``client`` the name by which clients share the service, empty
    where there are none. ``rates`` is None where no key has a rate, and ``bodies`` where no body is read.
    ``departure`` ends the work when the client goes away. ``model`` is the name of the model that answers,
    once it is known, ``failure`` the answer where it is an error, ``error_shape`` its form where that is not
    the route's, ``unexpected`` an error that no handler knows, and ``body`` the request's, once it has been
    read. ``held_bytes`` are those that the request holds.
    """

    line: RequestLine
    deadline: Deadline
    path: str
    method: str = "POST"
    peer: str = ""
    headers: Mapping[bytes, bytes] = msgspec.field(default_factory=dict)
    body_bytes: int | None = None
    rates: RateLimiter | None = None
    bodies: Budget | None = None
    departure: Departure = msgspec.field(default_factory=Departure)
    key: str = ANONYMOUS
    client: str = ""
    ticket: Ticket | None = None
    model: str = ""
    failure: Failure | None = None
    error_shape: ErrorShape | None = None
    unexpected: Exception | None = None
    body: bytes | None = None
    held_bytes: int = 0
    _counted: bool = False
    _paid: bool = False

    @classmethod
    def open(cls, scope: Scope, rates: RateLimiter | None = None, *, seconds: float = math.inf) -> Exchange:
        """Begin the exchange of an HTTP request that has ``seconds``, and keep it in the request's scope."""
        headers = dict(reversed(scope["headers"]))
        length = headers.get(b"content-length", b"")
        state = scope.setdefault("state", {})
        exchange = state["exchange"] = cls(
            line=RequestLine(request_id_of(headers)),
            deadline=Deadline.after(seconds),
            path=scope["path"],
            method=scope["method"],
            peer=str((scope.get("client") or ("",))[0]),
            headers=headers,
            body_bytes=int(length) if length.isdigit() else None,
            rates=rates,
            departure=state.get("departure") or Departure(),
        )
        return exchange

    def count(self) -> None:
        """Count the request in its key's rate, once; raises ``RateLimited``."""
        if self.rates is not None and not self._counted:
            self.rates.admit(self.key)
        self._counted = True

    def pay(self, tokens: int, units: int, nbytes: int) -> None:
        """Charge what the request takes of workers, and ``nbytes`` of its answer: the one place that does.

        The key's rate is charged once, however often the request gets another ticket. Raises ``Overloaded``
        where its model has no room for it, ``RateLimited`` where its key has none left.
        """
        note(tokens=tokens, units=units)
        if self.ticket is not None:
            self.ticket.charge(tokens, units, nbytes)
        if self.rates is not None and not self._paid:
            self.rates.charge(self.key, tokens)
        self._paid = True

    def hold(self, nbytes: int) -> None:
        """Hold bytes before they are read; raises ``Overloaded`` where requests have no room for them.

        They are those of the body, of images that it names, of tensors in shared memory. All stay held until
        the answer begins: what is made of them, texts and images, lives as long.
        """
        if self.bodies is not None:
            self.bodies.hold(self.client, nbytes)
            self.held_bytes += nbytes

    def hold_once_free(self, nbytes: int, spare: int = 0) -> None:
        """As ``hold``, for who asks until there is room, which counts as no refusal.

        There has to be room for ``spare`` more, which others may take.
        """
        if self.bodies is not None:
            if not self.bodies.admits(self.client, nbytes + spare):
                raise self.bodies.overloaded(self.client, nbytes)
            self.bodies.take(self.client, nbytes)
            self.held_bytes += nbytes

    async def hold_in_turn(self, nbytes: int, seconds: float) -> None:
        """Hold bytes that somebody else will send, once there is room for them.

        Raises ``Overloaded`` as ``Budget.hold_in_turn``.
        """
        if self.bodies is not None:
            await self.bodies.hold_in_turn(self.client, nbytes, seconds, self)
            self.held_bytes += nbytes

    def hold_only(self, nbytes: int) -> None:
        """Hold so many bytes, which are no more than are held already."""
        if self.bodies is not None and self.held_bytes > nbytes:
            self.bodies.give(self.client, self.held_bytes - nbytes)
            self.held_bytes = nbytes

    def let_go(self) -> None:
        """Give back the bytes of the request, which is answered or not wanted any more."""
        if self.body is not None:
            held, self.body = [self.body], None
            free_aside(held.clear, len(held[0]))
        self.hold_only(0)

    async def aside(self, threads: Threads, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which a thread does in the turn of the request's key."""
        async with self.deadline.bound():
            return await threads.run(work, self.client)

    def leave(self) -> None:
        """Give the request's place back, if it has one."""
        if self.ticket is not None:
            self.ticket.close()
            self.ticket = None


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of an HTTP request that the middleware has seen."""
    exchange: Exchange = scope["state"]["exchange"]
    return exchange


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the id that a client gave its request, or a new one: 32 hexadecimal digits."""
    given = headers.get(b"x-request-id", b"")
    return given.decode("ascii") if _REQUEST_ID.fullmatch(given) else f"{_IDS.getrandbits(128):032x}"
