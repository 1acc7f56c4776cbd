"""Starts a child process and asks it numbered questions over a socket pair."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Final, Self, TypeVar

from tessera.errors import Unavailable, from_code
from tessera.local.channel import Channel
from tessera.local.messages import Answer, Begun, Cancel, Failed, First, Question, Refused

_END_SECONDS: Final = 10.0
_TOLD_SECONDS: Final = 5.0


A = TypeVar("A", bound=Answer)


class ChildLost(Exception):
    """The process ended before it had answered."""


class Child:
    """The parent's end; ``begun`` is what the child said when it could be asked.

    The child is killed when the thread that started it ends.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, begun: Begun) -> None:
        self._process = process
        self._channel = channel
        self.begun = begun
        self.ended = False
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._why = ""
        self.lost: Callable[[str], object] = lambda why: None
        """Called with the reason when the process has ended without having been told to."""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        module: str,
        first: First,
        *,
        environment: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
        kept: Sequence[int] = (),
    ) -> Self:
        """Run ``python -m module FD words``, which inherits the descriptors in ``kept``.

        Raises what the child refused to begin for.
        """
        process, ours = _spawn(module, environment, words, kept)
        channel = await Channel.of(ours)
        try:
            with suppress(ConnectionError):
                await channel.send(first)
            begun = await channel.receive()
            if isinstance(begun, Refused):
                raise from_code(begun.code, begun.message)
            if not isinstance(begun, Begun):
                raise Unavailable(f"the engine could not be started: {await _end_of(process)}")
        except BaseException:
            channel.close()
            process.kill()
            await asyncio.to_thread(process.wait)
            raise
        return cls(process, channel, begun)

    async def ask(self, question: Callable[[int], Question], kind: type[A]) -> A:
        """The answer, of this kind, to what ``question`` makes of a number.

        Raises ``ChildLost``, and ``TesseraError`` where the child could not answer this one.
        """
        if self.ended:
            raise ChildLost(self._why)
        number = next(self._numbers)
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = asked
        try:
            # The reader learns why there is nobody, and tells all who wait.
            with suppress(ConnectionError):
                await self._channel.send(question(number))
            answer = await asked
        except asyncio.CancelledError:
            # Hundreds of pictures may be under way, which the next question would wait for.
            self._channel.post(Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, Failed):
            raise from_code(answer.code, answer.message)
        assert isinstance(answer, kind)
        return answer

    async def close(self) -> None:
        """End it, whatever it is about."""
        self.lost = lambda why: None
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await self._reading

    async def _read(self) -> None:
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, Answer):
                if (asked := self._waiting.get(message.number)) is not None and not asked.done():
                    asked.set_result(message)
            elif isinstance(message, Refused):
                self._why = message.message
                break
        self.ended = True
        self._why = self._why or await _end_of(self._process)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChildLost(self._why))
        self.lost(self._why)


def _spawn(
    module: str, environment: Mapping[str, str] | None, words: Sequence[str], kept: Sequence[int]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child and this end of its channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *words],
            env=os.environ if environment is None else environment,
            pass_fds=(theirs.fileno(), *kept),
            stdin=subprocess.DEVNULL,
            # What a library prints is not to be taken for an answer of the command that starts engines.
            stdout=2,
        )
    return process, ours


async def _end_of(process: subprocess.Popen[bytes]) -> str:
    """How a child ended whose end of the channel is closed."""
    try:
        status = await asyncio.to_thread(process.wait, _TOLD_SECONDS)
    except subprocess.TimeoutExpired:
        return "it says nothing any more"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"
