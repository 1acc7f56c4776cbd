"""Receives the messages of gRPC calls, within the bytes that the bodies of all requests may have."""

from __future__ import annotations

import asyncio
import math
import time
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
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
# gRPC joins a message on the loop, which takes 0.07 s of a processor over 60 MB, and stands ten times as long
# where others have nine tenths of it. A sender's large messages may have a third of the loop's time: what has
# come waits unjoined.
_PAUSE_SHARE: Final = 2
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
        # By sender, the monotonic time at which its next message may be joined.
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
            return await self._read(context, exchange)
        try:
            return await self._in_turn(context, exchange, _SILENT_SECONDS)
        finally:
            exchange.let_go()

    async def _in_turn(self, context: Any, exchange: Exchange, silent_seconds: float) -> Any:
        await self._turns.take(exchange.client)
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
            return await self._read(context, exchange)
        finally:
            for timer in timers:
                timer.cancel()
            place.leave()

    def _wait_seconds(self, exchange: Exchange) -> float:
        return max(0.0, self._next.get(_sender(exchange), 0.0) - time.monotonic())

    def _sends_large(self, exchange: Exchange) -> bool:
        return self._next.get(_sender(exchange), -math.inf) > time.monotonic() - _REMEMBERED_SECONDS

    async def _read(self, context: Any, exchange: Exchange) -> Any:
        """Read a message, or ``EOF``; after a large one all others of its sender wait to be joined."""

        async def pause() -> None:
            while seconds := self._wait_seconds(exchange):  # noqa: ASYNC110 - time alone ends it
                await asyncio.sleep(seconds)

        # gRPC's iterator would hold the message until a full collection.
        raw, stood = await in_steps(context.read(), pause)
        if raw is not grpc.aio.EOF and len(raw) >= _LARGE_BYTES:
            now = time.monotonic()
            self._next[_sender(exchange)] = now + _PAUSE_SHARE * stood
            if len(self._next) > _MOST_PACED:
                self._next = {name: at for name, at in self._next.items() if at > now}
        return raw


async def in_steps(
    reading: Coroutine[Any, None, Any], pause: Callable[[], Coroutine[Any, None, None]]
) -> tuple[Any, float]:
    """Await ``pause`` whenever a coroutine could go on; return what it does, and its last step's seconds.

    In the last step of reading a message gRPC joins it, which nothing else can put off.
    """
    return await _stepped(reading, pause)


@types.coroutine
def _stepped(
    reading: Coroutine[Any, None, Any], pause: Callable[[], Coroutine[Any, None, None]]
) -> Generator[Any, None, tuple[Any, float]]:
    step = partial(reading.send, None)
    while True:
        began = time.monotonic()
        try:
            waited_for = step()
        except StopIteration as end:
            return end.value, time.monotonic() - began
        try:
            yield waited_for
            yield from pause().__await__()
            step = partial(reading.send, None)
        except BaseException as error:
            step = partial(reading.throw, error)


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
