"""Receives the messages of gRPC calls, within the bytes that the bodies of all requests may have."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc.aio

from tessera.budgets import Budget
from tessera.errors import Overloaded, RequestCancelled
from tessera.frontend.exchange import Exchange
from tessera.turns import Turns
from tessera_kserve.silence import Silence

# Of messages whose length is not known yet, each of which gRPC has twice for a moment: those of calls, and as
# many of streams.
_UNKNOWN_BYTES: Final = 64 << 20
# Of streams that have sent a large message, and have not been silent for long since.
_LARGE_BYTES: Final = 128 << 20
_IDLE_SECONDS: Final = 10.0
WINDOW_BYTES: Final = 1 << 18
"""Of a message that nobody has asked for: what a stream of HTTP/2 takes unasked. gRPC has to be told."""

# A message that takes longer than this counts as one of the largest, and leaves its place to others.
_SLOW_SECONDS: Final = 0.05
# What found no room to leave its turn for looks again.
_LOOK_SECONDS: Final = 0.5
# The rate of a sender of large messages: their joins have a third of the loop's time. Without it another
# key's short text took 28 to 42 ms at the median beside them, with it 8.
_BYTES_A_SECOND: Final = 200 << 20
_LARGE_MESSAGE: Final = 8 << 20
_MOST_PACED: Final = 1024
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

    def __init__(
        self,
        max_bytes: int,
        held_bytes: Callable[[], int],
        hold: Callable[[Exchange, int, Callable[[], int]], Awaitable[None]],
    ) -> None:
        """``max_bytes`` is what gRPC takes of a message, ``held_bytes`` gives those of bodies in use.

        ``hold`` waits for room for bytes of an exchange, and for others to spare.
        """
        self._max_bytes = max_bytes
        self._hold = hold
        # By client, the calls that have room for the largest message.
        self._with_room: Counter[str] = Counter()
        slots = max(1, _UNKNOWN_BYTES // max_bytes)
        self._turns, self._stream_turns = Turns(slots), Turns(slots)
        self.silence = Silence(held_bytes)
        self._large = Budget(lambda: _LARGE_BYTES)
        self._joins = _Joins()
        self._pace = _Pace()

    async def receive(self, context: Any, exchange: Exchange) -> bytes:
        """Return the message of a call's context, whose bytes its exchange then holds.

        Raises ``Overloaded`` where too many wait for room, and ``RequestCancelled`` where there is none.
        """
        # Half of a small budget: beside its own window a call would wait for the whole for ever.
        most = self._max_bytes
        if exchange.bodies is not None:
            most = min(most, exchange.bodies.limit // 2)
        client, room = exchange.client, False
        # Windows leave room for one message: without it no call that has its turn would get any further.
        await self._hold(exchange, WINDOW_BYTES, lambda: 0 if self._with_room[client] else most)
        await self._pace.take(self._turns, exchange)
        with _turn(self._turns, client, lambda: room):
            await self._hold(exchange, most, lambda: 0)
            room = True
            self._with_room[client] += 1
            try:
                # gRPC's iterator would hold the message until a full collection.
                raw = await _Read(context, self._joins)
            finally:
                self._with_room[client] -= 1
        self._pace.count(exchange, raw)
        if raw is grpc.aio.EOF:
            # Or it is too large: gRPC answers that itself, and does not tell.
            raise RequestCancelled("the call ended before its message had come")
        if len(raw) > exchange.held_bytes:
            exchange.let_go()
            exchange.hold(len(raw))
        exchange.hold_only(len(raw))
        return raw  # type: ignore[no-any-return]

    async def receive_next(self, context: Any, exchange: Exchange, *, large: bool) -> Any:
        """Return the next message of a stream, or ``grpc.aio.EOF``; the exchange holds none of its bytes.

        Of a stream whose last message was ``large`` the next one may be, and counts as the largest. Raises
        ``Overloaded`` where streams say nothing and memory runs short meanwhile.
        """
        await self._pace.take(self._stream_turns, exchange)
        client, loop, held = exchange.client, asyncio.get_running_loop(), False

        def leave() -> bool:
            nonlocal held
            if large:
                if not self._large.admits(client, self._max_bytes):
                    return False
                held = True
                self._large.take(client, self._max_bytes)
                loop.call_later(_IDLE_SECONDS, give_up)
            return True

        def give_up() -> None:
            nonlocal held
            if held:
                held = False
                self._large.give(client, self._max_bytes)

        try:
            async with asyncio.timeout(None) as clock:
                with self.silence.of(client, clock), _turn(self._stream_turns, client, leave):
                    raw = await _Read(context, self._joins)
        except TimeoutError:
            raise Overloaded(
                "the stream was silent while memory ran short; open one that has something to say",
                retry_after=1.0,
            ) from None
        finally:
            give_up()
        self._pace.count(exchange, raw)
        return raw


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


class _Pace:
    """Has the next message of a sender wait behind one that was large."""

    def __init__(self) -> None:
        # By sender, the time of the loop at which its next message may be received.
        self._next: dict[str, float] = {}

    async def take(self, turns: Turns, exchange: Exchange) -> None:
        """Take a turn as soon as the sender's pace allows it."""
        while True:
            await asyncio.sleep(self._wait_seconds(exchange))
            await turns.take(exchange.client)
            if not self._wait_seconds(exchange):
                return
            turns.give(exchange.client)

    def count(self, exchange: Exchange, raw: Any) -> None:
        """Count a message, or the end of a call."""
        if raw is grpc.aio.EOF or len(raw) < _LARGE_MESSAGE:
            return
        sender, now = self._sender(exchange), asyncio.get_running_loop().time()
        self._next[sender] = max(self._next.get(sender, 0.0), now) + len(raw) / _BYTES_A_SECOND
        if len(self._next) > _MOST_PACED:
            self._next = {name: at for name, at in self._next.items() if at > now}

    def _wait_seconds(self, exchange: Exchange) -> float:
        return max(0.0, self._next.get(self._sender(exchange), 0.0) - asyncio.get_running_loop().time())

    @staticmethod
    def _sender(exchange: Exchange) -> str:
        """Return a name; clients without keys are told apart by their addresses."""
        return exchange.client or exchange.peer


class _Joins:
    """Parts the messages that have come by turns of the loop, which stands while gRPC joins one.

    32 MiB take 0.05 s of processor time, and those that came meanwhile would be joined in the same turn.
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
