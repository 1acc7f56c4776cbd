"""Receives the messages of gRPC calls, within the bytes that the bodies of all requests may have."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc.aio

from tessera.errors import RequestCancelled
from tessera.frontend.exchange import Exchange
from tessera.turns import Turns

# Of messages whose length is not known yet: two of the largest, each of which gRPC has twice for a moment.
_UNKNOWN_BYTES: Final = 128 << 20
# Of a call whose message nobody has asked for: the window of its stream.
_WINDOW_BYTES: Final = 1 << 16
# A message that takes longer than this counts as one of the largest, and leaves its place to others.
_SLOW_SECONDS: Final = 0.05
# For a message without fields, which comes with its call.
_EMPTY_SECONDS: Final = 1.0


async def skip_message(context: Any) -> None:
    """Wait for a message without fields, from a client that may have no key, and no longer than it takes."""
    reading = asyncio.ensure_future(context.read())
    # It ends with the call.
    reading.add_done_callback(lambda read: read.cancelled() or read.exception())
    await asyncio.wait({reading}, timeout=_EMPTY_SECONDS)


class Receiver:
    """Receives few messages at a time: the length of one is known when it is there. Owned by one event loop.

    They are received in turns by client.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turns = Turns(max(1, _UNKNOWN_BYTES // max_bytes))

    async def receive(self, context: Any, exchange: Exchange) -> bytes:
        """Return the message of a call's context, whose bytes its exchange then holds.

        Raises ``Overloaded`` where there is no room for it, and ``RequestCancelled`` where there is none.
        """
        exchange.hold(_WINDOW_BYTES)
        await self._turns.take(exchange.client)
        place = _Place(self._turns, exchange)
        slow = asyncio.get_running_loop().call_later(_SLOW_SECONDS, place.leave_for_bytes, self._max_bytes)
        try:
            # gRPC's iterator would hold the message until a full collection.
            raw = await context.read()
        finally:
            slow.cancel()
            place.leave()
        if raw is grpc.aio.EOF:
            raise RequestCancelled("the call ended before its message had come")
        exchange.let_go()
        exchange.hold(len(raw))
        return raw  # type: ignore[no-any-return]


class _Place:
    """Holds a slot until it is left."""

    def __init__(self, turns: Turns, exchange: Exchange) -> None:
        self._turns = turns
        self._exchange = exchange
        self._left = False

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._turns.give(self._exchange.client)

    def leave_for_bytes(self, nbytes: int) -> None:
        """Hold the bytes of the largest message instead, if there is room for them."""
        bodies = self._exchange.bodies
        if bodies is not None and bodies.admits(self._exchange.client, nbytes):
            self._exchange.hold(nbytes)
            self.leave()
