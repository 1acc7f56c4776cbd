"""Receives the messages of gRPC calls, within the bytes that the bodies of all requests may have."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

import grpc.aio

from tessera.errors import RequestCancelled
from tessera.frontend.exchange import Exchange
from tessera.turns import Turns

# Of messages whose length is not known yet: two of the largest, each of which gRPC has twice for a moment.
_UNKNOWN_BYTES: Final = 128 << 20
WINDOW_BYTES: Final = 1 << 18
"""Of a message that nobody has asked for: what a stream of HTTP/2 takes unasked. gRPC has to be told."""

# A message that takes longer than this counts as one of the largest, and leaves its place to others.
_SLOW_SECONDS: Final = 0.05
# gRPC joins a message on the loop, which stands for 0.04 to 0.1 s over 60 MB. After one that is as large its
# sender's next one is waited for only when this rate allows it: a third of the loop's time.
_BYTES_A_SECOND: Final = 200 << 20
_LARGE_BYTES: Final = 8 << 20
# Whoever has sent a large message may send more.
_REMEMBERED_SECONDS: Final = 10.0
# Of a stream, whose next message may come at any time.
_SILENT_SECONDS: Final = 2.0
_MOST_PACED: Final = 1024
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
        # By sender, the time of the loop at which its next message may be joined.
        self._next: dict[str, float] = {}

    async def receive(self, context: Any, exchange: Exchange) -> bytes:
        """Return the message of a call's context, whose bytes its exchange then holds.

        Raises ``Overloaded`` where there is no room for it, and ``RequestCancelled`` where there is none.
        """
        exchange.hold(WINDOW_BYTES)
        raw = await self._in_turn(context, exchange, math.inf)
        if raw is grpc.aio.EOF:
            raise RequestCancelled("the call ended before its message had come")
        exchange.let_go()
        exchange.hold(len(raw))
        return raw  # type: ignore[no-any-return]

    async def receive_next(self, context: Any, exchange: Exchange, *, first: bool) -> Any:
        """Return the next message of a stream, or ``grpc.aio.EOF``; the exchange holds nothing afterwards.

        The ``first`` one, which mostly comes with its stream, and those of a sender of large ones have turns.
        A stream that is silent leaves them to others, and holds nothing.
        """
        if not (first or self._sends_large(exchange)):
            raw = await context.read()
            self._count(exchange, raw)
            return raw
        try:
            return await self._in_turn(context, exchange, _SILENT_SECONDS)
        finally:
            exchange.let_go()

    async def _in_turn(self, context: Any, exchange: Exchange, silent_seconds: float) -> Any:
        await self._enter(exchange)
        place, loop = _Place(self._turns, exchange), asyncio.get_running_loop()

        def slow() -> None:
            # Of a stream whose sender has sent no large message it is most likely that it is silent.
            if silent_seconds == math.inf or self._sends_large(exchange):
                place.leave_for_bytes(self._max_bytes)
            else:
                place.leave()

        def silent() -> None:
            place.leave()
            exchange.let_go()

        timers = [loop.call_later(_SLOW_SECONDS, slow)]
        if silent_seconds < math.inf:
            timers.append(loop.call_later(silent_seconds, silent))
        try:
            # gRPC's iterator would hold the message until a full collection.
            raw = await context.read()
        finally:
            for timer in timers:
                timer.cancel()
            place.leave()
        self._count(exchange, raw)
        return raw

    async def _enter(self, exchange: Exchange) -> None:
        """Take a slot as soon as the sender's pace allows it."""
        while True:
            await asyncio.sleep(self._wait_seconds(exchange))
            await self._turns.take(exchange.client)
            if not self._wait_seconds(exchange):
                return
            self._turns.give(exchange.client)

    def _wait_seconds(self, exchange: Exchange) -> float:
        return max(0.0, self._next.get(_sender(exchange), 0.0) - asyncio.get_running_loop().time())

    def _sends_large(self, exchange: Exchange) -> bool:
        now = asyncio.get_running_loop().time()
        return self._next.get(_sender(exchange), -math.inf) > now - _REMEMBERED_SECONDS

    def _count(self, exchange: Exchange, raw: Any) -> None:
        """Have the next message of its sender wait behind one that was large."""
        if raw is grpc.aio.EOF or len(raw) < _LARGE_BYTES:
            return
        sender, now = _sender(exchange), asyncio.get_running_loop().time()
        self._next[sender] = max(self._next.get(sender, 0.0), now) + len(raw) / _BYTES_A_SECOND
        if len(self._next) > _MOST_PACED:
            self._next = {name: at for name, at in self._next.items() if at > now}


def _sender(exchange: Exchange) -> str:
    """Return a name; clients without keys are told apart by their addresses."""
    return exchange.client or exchange.peer


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
