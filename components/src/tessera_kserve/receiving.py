"""Receives the messages of gRPC calls, within the bytes that the bodies of all requests may have."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc.aio

from tessera.budgets import Budget
from tessera.errors import Overloaded, RequestCancelled
from tessera.frontend.exchange import Exchange
from tessera.turns import Turns

# Of messages whose length is not known yet, each of which gRPC has twice for a moment: those of calls, and as
# many of streams.
_UNKNOWN_BYTES: Final = 64 << 20
SILENT_BYTES: Final = 256 << 20
"""Of streams that are silent: each may at any time begin to send a message which it never ends."""
WINDOW_BYTES: Final = 1 << 18
"""Of a message that nobody has asked for: what a stream of HTTP/2 takes unasked. gRPC has to be told."""

# A message that takes longer than this counts as one of the largest, and leaves its place to others.
_SLOW_SECONDS: Final = 0.05
# What found no room to leave its turn for looks again.
_LOOK_SECONDS: Final = 0.5
# A stream without a call under way for so long may have to give its place to another one. Before that a large
# message may be on its way.
_IDLE_SECONDS: Final = 10.0
# Places of silent streams that are left to those that have no call under way.
_SPARE_PLACES: Final = 4
# What is joined in one turn of the loop, before the message that goes beyond it. Of many values: 0.02 s.
_JOINED_BYTES: Final = 1 << 18
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
        """``max_bytes`` is what gRPC takes of a message."""
        self._max_bytes = max_bytes
        slots = max(1, _UNKNOWN_BYTES // max_bytes)
        self._turns, self._stream_turns = Turns(slots), Turns(slots)
        self._silent = Budget(lambda: SILENT_BYTES)
        # Those that wait for a message, in the order in which they began to.
        self._streams: dict[_Stream, None] = {}
        self._joins = _Joins()

    async def receive(self, context: Any, exchange: Exchange) -> bytes:
        """Return the message of a call's context, whose bytes its exchange then holds.

        Raises ``Overloaded`` where there is no room for it, and ``RequestCancelled`` where there is none.
        """
        exchange.hold(WINDOW_BYTES)
        client, bodies = exchange.client, exchange.bodies

        def leave() -> bool:
            """Hold the bytes of the largest message instead of a turn, if there is room for them."""
            if bodies is None or not bodies.admits(client, self._max_bytes):
                return False
            exchange.hold(self._max_bytes)
            return True

        await self._turns.take(client)
        with _turn(self._turns, client, leave):
            # gRPC's iterator would hold the message until a full collection.
            raw = await _Read(context, self._joins)
        if raw is grpc.aio.EOF:
            # Or it is too large: gRPC answers that itself, and does not tell.
            raise RequestCancelled("the call ended before its message had come")
        exchange.let_go()
        exchange.hold(len(raw))
        return raw  # type: ignore[no-any-return]

    async def receive_next(self, context: Any, client: str, idle_since: Callable[[], float]) -> Any:
        """Return the next message of a stream, or ``grpc.aio.EOF``.

        ``idle_since`` gives the loop's time since which the stream has had no call under way, or infinity.
        Raises ``Overloaded`` where it is idle, says nothing, and others of its client want its place.
        """
        await self._stream_turns.take(client)
        stream = _Stream(client, idle_since)
        self._streams[stream] = None
        try:
            with _turn(self._stream_turns, client, partial(self._fall_silent, stream)):
                async with stream.clock:
                    return await _Read(context, self._joins)
        except TimeoutError:
            raise Overloaded(
                "the stream was silent, and others wait for its place; open one that has something to say",
                retry_after=1.0,
            ) from None
        finally:
            del self._streams[stream]
            self._speak(stream)

    def is_scarce(self, client: str) -> bool:
        """Whether few streams more of a client may be silent."""
        return not self._silent.admits(client, _SPARE_PLACES * self._max_bytes)

    def _fall_silent(self, stream: _Stream) -> bool:
        """Count it among those that are silent; without room it takes that of its client's first idle one."""
        if not self._silent.admits(stream.client, self._max_bytes):
            ours = (other for other in self._streams if other.client == stream.client and other.idle)
            if (first := next(ours, None)) is None:
                return False
            first.clock.reschedule(-math.inf)
            self._speak(first)
        self._silent.take(stream.client, self._max_bytes)
        stream.silent = True
        return True

    def _speak(self, stream: _Stream) -> None:
        """Count it among those that are silent no more."""
        if stream.silent:
            stream.silent = False
            self._silent.give(stream.client, self._max_bytes)


@contextmanager
def _turn(turns: Turns, client: str, leave: Callable[[], bool]) -> Iterator[None]:
    """Give a turn back at the end, or, if it takes long, as soon as ``leave`` allows it."""
    loop, held = asyncio.get_running_loop(), True
    timer: asyncio.TimerHandle

    def slow() -> None:
        nonlocal held, timer
        if leave():
            held = False
            turns.give(client)
        else:
            timer = loop.call_later(_LOOK_SECONDS, slow)

    timer = loop.call_later(_SLOW_SECONDS, slow)
    try:
        yield
    finally:
        timer.cancel()
        if held:
            turns.give(client)


class _Stream:
    """Waits for its next message, on behalf of a client, until its clock is over."""

    def __init__(self, client: str, idle_since: Callable[[], float]) -> None:
        self.client = client
        self.clock = asyncio.timeout(None)
        self.silent = False
        self._idle_since = idle_since
        self._began = asyncio.get_running_loop().time()

    @property
    def idle(self) -> bool:
        """Whether it has been among those that are silent for long, without a call under way."""
        since = max(self._began, self._idle_since())
        return self.silent and since < asyncio.get_running_loop().time() - _IDLE_SECONDS


class _Joins:
    """Parts the messages that have come by turns of the loop, which stands while gRPC joins one.

    16 MiB take 0.02 s of processor time, and those that came meanwhile would be joined in the same turn.
    """

    def __init__(self) -> None:
        self._joined_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def wait(self) -> Generator[Any, None, None]:
        """Wait for a turn in which little has been joined."""
        if self._joined_bytes >= _JOINED_BYTES:
            granted = asyncio.get_running_loop().create_future()
            self._waiting.append(granted)
            yield from granted

    def count(self, nbytes: int) -> None:
        """Count a message that has been joined."""
        if nbytes and not self._joined_bytes:
            asyncio.get_running_loop().call_soon(self._begin)
        self._joined_bytes += nbytes

    def _begin(self) -> None:
        """Begin a turn: with the message that has waited longest, which then is the only one in it."""
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                asyncio.get_running_loop().call_soon(self._begin)
                return
        self._joined_bytes = 0


@dataclass(slots=True)
class _Read:
    """Awaits the next message of a call, and, when it has come, a turn of the loop that may join it."""

    context: Any
    joins: _Joins

    def __await__(self) -> Generator[Any, None, Any]:
        steps = self.context.read().__await__()
        step = partial(steps.send, None)
        while True:
            try:
                waited = step()
            except StopIteration as read:
                if read.value is not grpc.aio.EOF:
                    self.joins.count(len(read.value))
                return read.value
            try:
                yield waited
                yield from self.joins.wait()
            except BaseException as error:
                step = partial(steps.throw, error)
            else:
                step = partial(steps.send, None)
