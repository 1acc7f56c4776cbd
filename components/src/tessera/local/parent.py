"""Answers the parent of this process until it has gone."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from tessera.errors import EngineDead, TesseraError, internal_error
from tessera.free_memory import give_back_free_memory
from tessera.local.channel import Channel
from tessera.local.messages import Answer, Begun, Cancel, Failed, First, Question, Refused
from tessera.process_exit import ENGINE_DEAD
from tessera.sandbox.confinement import die_with_parent

log = logging.getLogger(__name__)

Died = Callable[[EngineDead], None]


class Answerer(Protocol):
    """What a child answers with; ``begun`` is what it says first."""

    @property
    def begun(self) -> Begun: ...

    async def answer(self, question: Question) -> Answer:
        """Raises ``TesseraError`` where nothing can be answered any more."""
        ...

    async def close(self) -> None: ...


def belong_to_parent() -> None:
    """End when the parent does, and by its word alone: a terminal tells the whole group of an interrupt."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def answer_parent(descriptor: int, start: Callable[[First, Died], Awaitable[Answerer]]) -> int:
    """Answer until the parent goes away or the engine has died; the exit status.

    ``start`` makes the answerer of the first message.
    """
    channel = await Channel.of(socket.socket(fileno=descriptor))
    first = await channel.receive()
    if not isinstance(first, First):
        return 0
    dead: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()

    def died(error: EngineDead) -> None:
        if not dead.done():
            dead.set_result(error)

    try:
        answerer = await start(first, died)
    except TesseraError as error:
        await channel.send(Refused(error.code, error.message))
        return 1
    await channel.send(answerer.begun)
    giving_back = give_back_free_memory()
    answering: dict[int, asyncio.Task[None]] = {}

    async def answer(question: Question) -> None:
        try:
            message: Answer | Refused = await answerer.answer(question)
        except TesseraError as error:
            message = Refused(error.code, error.message)
        except Exception as error:
            log.exception("a question could not be answered")
            failure = internal_error(error)
            message = Failed(question.number, failure.code, failure.message)
        with suppress(ConnectionError):
            await channel.send(message)

    async def receive() -> None:
        while isinstance(message := await channel.receive(), Question | Cancel):
            number = message.number
            if not isinstance(message, Cancel):
                answering[number] = task = asyncio.create_task(answer(message))
                task.add_done_callback(partial(_forget, answering, number))
            elif number in answering:
                answering[number].cancel()

    receiving = asyncio.create_task(receive())
    either: list[asyncio.Future[Any]] = [receiving, dead]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if dead.done():
        why = dead.result()
        log.critical("leaving: %s", why)
        with suppress(ConnectionError):
            await channel.send(Refused(why.code, why.message))
        return ENGINE_DEAD
    for task in (giving_back, *answering.values()):
        if task is not None:
            task.cancel()
    await answerer.close()
    return 0


def _forget(answering: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del answering[number]
