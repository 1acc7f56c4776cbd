"""Engines in child processes of the run, one for each card, or one without a card."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from tessera import machine
from tessera.corpus.columns import Columns
from tessera.corpus.embedder import Served, Usage, VectorSettings
from tessera.corpus.frames import Channel, Embed, Frame, Made, Ready, Refused, Start, Tell, Used
from tessera.corpus.item import Embedded, Failure, Item
from tessera.defaults import ENGINE_CONFIGS
from tessera.errors import ConfigError, EngineDead, ProtocolError, Unavailable, from_code
from tessera.models import find, open_model
from tessera.models.base import OutputKind

# Processes that end without having answered anything, one after another, before the run gives up.
_DEATHS: Final = 5
_END_SECONDS: Final = 10.0
_TOLD_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """How engine processes are started: flags of a worker, what is known of the model, and the cards.

    ``cards`` are entries for CUDA_VISIBLE_DEVICES, an empty one where the environment is to stay as it is.
    """

    flags: Sequence[str]
    source: str
    vectors: VectorSettings
    cards: Sequence[str] = ("",)
    log: Sequence[str] = ()


def worker_flags(directory: Path, engines_on_host: int, passed: Sequence[str]) -> list[str]:
    """Those of a worker that embeds a corpus beside others on its host; ``passed`` are the user's own."""
    flags = ["--model-path", str(directory), "--workers-on-host", str(engines_on_host)]
    if not any(word.partition("=")[0] == "--extra-engine-args" for word in passed):
        flags += ["--extra-engine-args", str(ENGINE_CONFIGS)]
    return [*flags, *passed]


def plan_engines(
    named: str,
    revision: str,
    vectors: VectorSettings,
    *,
    passed: Sequence[str] = (),
    log: Sequence[str] = (),
    bar: bool = False,
    most: int | None = None,
) -> EnginePlan:
    """An engine for each card, ``most`` of them, of the model that is named; downloads it if need be.

    Raises ``ConfigError`` and ``CheckpointError`` for what is no model that makes vectors.
    """
    source = find(named, revision, bar=bar)
    model = open_model(source.directory, {})
    if model.output.kind is OutputKind.SCORE:
        raise ConfigError(f"{named} ({model.family}) gives scores of pairs, and no vectors")
    cards = ([card.entry for card in machine.this_machine(os.environ).cards] or [""])[:most]
    return EnginePlan(
        flags=worker_flags(source.directory, len(cards), passed),
        source=source.as_json(),
        vectors=vectors,
        cards=cards,
        log=log,
    )


class EngineLost(Exception):
    """The process ended before it had answered."""


class EngineProcesses:
    """Implements ``Embedder``; a process that ends is started again.

    What was under way in one that ended is tried again part by part with nothing else beside it, until the
    item is found that it ends over: that one is a failure, and all others are embedded.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._engines = [_Engine(plan, card) for card in plan.cards]

    @classmethod
    async def start(cls, plan: EnginePlan) -> Self:
        """Raises ``TesseraError`` where an engine cannot be started."""
        started = cls(plan)
        try:
            async with asyncio.TaskGroup() as group:
                for engine in started._engines:
                    group.create_task(engine.start())
        except BaseExceptionGroup as errors:
            await started.close()
            raise errors.exceptions[0] from None
        return started

    @property
    def served(self) -> Served:
        return self._engines[0].served

    @property
    def engines(self) -> int:
        return len(self._engines)

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        return await min(self._engines, key=_Engine.load).embed(items)

    async def usage(self) -> Usage:
        return sum(await asyncio.gather(*(engine.usage() for engine in self._engines)), Usage())

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class _Engine:
    """One process and its replacements."""

    def __init__(self, plan: EnginePlan, card: str) -> None:
        self._plan = plan
        self._card = card
        self._process: _Process | None = None
        self._served: Served | None = None
        # Of processes that ended, as far as they were asked; and of this one.
        self._before = Usage()
        self._now = Usage()
        self._deaths = 0
        # Set while items may be sent; not while those are tried that the last process may have ended over.
        self._open = asyncio.Event()
        self._alone = asyncio.Lock()
        self._suspects = 0
        self._in_flight = 0

    @property
    def served(self) -> Served:
        assert self._served is not None
        return self._served

    def load(self) -> tuple[bool, int]:
        return not self._open.is_set(), self._in_flight

    async def start(self) -> None:
        self._process = await _Process.start(self._plan, self._card)
        self._served = self._process.served
        self._open.set()

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        size = sum(item.nbytes for item in items)
        self._in_flight += size
        try:
            await self._open.wait()
            try:
                return await self._ask(items)
            except EngineLost:
                return await self._suspected(items)
        finally:
            self._in_flight -= size

    async def usage(self) -> Usage:
        if self._open.is_set() and self._process is not None:
            with suppress(EngineLost):
                self._now = await self._process.usage()
        return self._before + self._now

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    async def _ask(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        if self._process is None:
            raise EngineLost("its process has ended")
        found = await self._process.embed(items)
        self._deaths = 0
        return found

    async def _suspected(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        self._open.clear()
        self._suspects += 1
        try:
            async with self._alone:
                return await self._in_parts(items)
        finally:
            self._suspects -= 1
            if not self._suspects:
                self._open.set()

    async def _in_parts(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        await self._start_again()
        try:
            return await self._ask(items)
        except EngineLost as lost:
            if len(items) > 1:
                half = len(items) // 2
                return await self._in_parts(items[:half]) + await self._in_parts(items[half:])
            self._died(lost)
            (item,) = items
            reason = f"engine_dead: the engine's process ended over it: {lost}"
            return [item.failed(reason)]

    async def _start_again(self) -> None:
        """Where the process has ended. Raises what an engine is refused for."""
        while self._process is None or self._process.ended:
            if self._process is not None:
                await self._process.close()
                self._before, self._now = self._before + self._now, Usage()
                self._process = None
            try:
                self._process = await _Process.start(self._plan, self._card)
            except Unavailable as error:
                self._died(error)

    def _died(self, why: Exception) -> None:
        self._deaths += 1
        if self._deaths >= _DEATHS:
            raise EngineDead(f"{self._deaths} engine processes ended one after another: {why}") from why


class _Process:
    """A child that runs ``engine_process``."""

    def __init__(self, child: subprocess.Popen[bytes], channel: Channel, served: Served) -> None:
        self._child = child
        self._channel = channel
        self.served = served
        self.ended = False
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Made]] = {}
        self._told: list[asyncio.Future[Used]] = []
        self._why = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, plan: EnginePlan, card: str) -> Self:
        """Raises what the engine was refused for."""
        child, ours = _spawn(plan, card)
        channel = await Channel.of(ours)
        try:
            with suppress(ConnectionError):
                await channel.send(Start(list(plan.flags), plan.source, plan.vectors))
            first = await channel.receive()
            if isinstance(first, Refused):
                raise from_code(first.code, first.message)
            if not isinstance(first, Ready):
                raise Unavailable(f"the engine could not be started: {await _end_of(child)}")
        except BaseException:
            channel.close()
            child.kill()
            await asyncio.to_thread(child.wait)
            raise
        return cls(child, channel, first.served)

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        """Raises ``EngineLost``."""
        number = next(self._numbers)
        self._waiting[number] = asked = asyncio.get_running_loop().create_future()
        try:
            await self._send(Embed(number, list(items)))
            made = await asked
        finally:
            self._waiting.pop(number, None)
        return self._found(items, made)

    async def usage(self) -> Usage:
        """Raises ``EngineLost``."""
        told: asyncio.Future[Used] = asyncio.get_running_loop().create_future()
        self._told.append(told)
        await self._send(Tell())
        used = await told
        return Usage(engine_seconds=used.engine_seconds, images=used.images, cached_images=used.cached_images)

    async def close(self) -> None:
        """End it, whatever it is about."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._child.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
        await self._reading

    async def _send(self, frame: Frame) -> None:
        if self.ended:
            raise EngineLost(self._why)
        # The reader learns why, and tells all who wait.
        with suppress(ConnectionError):
            await self._channel.send(frame)

    async def _read(self) -> None:
        while (frame := await self._channel.receive()) is not None:
            if isinstance(frame, Made):
                if (asked := self._waiting.get(frame.number)) is not None and not asked.done():
                    asked.set_result(frame)
            elif isinstance(frame, Used):
                if not (told := self._told.pop(0)).done():
                    told.set_result(frame)
            elif isinstance(frame, Refused):
                self._why = frame.message
                break
        self.ended = True
        self._why = self._why or await _end_of(self._child)
        left: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._told]
        for future in left:
            if not future.done():
                future.set_exception(EngineLost(self._why))
        self._told.clear()

    def _found(self, items: Sequence[Item], made: Made) -> list[Embedded | Failure]:
        rows = np.frombuffer(made.rows, "<f4").reshape(-1, self.served.width)
        if len(made.counts) != len(items) or sum(made.counts) != len(rows):
            raise ProtocolError(f"an engine answered with {len(made.counts)} of {len(items)} items")
        columns = Columns(rows=rows, counts=made.counts, tokens=made.tokens, reasons=made.reasons)
        return columns.of(items)


def _spawn(plan: EnginePlan, card: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A child and this end of its channel. From the main thread: the child ends with the one that made it."""
    ours, theirs = socket.socketpair()
    environment: Mapping[str, str] = os.environ
    if card:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card}
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "tessera.corpus.engine_process", str(theirs.fileno()), *plan.log],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            # What a library prints is not to be taken for the run's own answer.
            stdout=2,
        )
    return child, ours


async def _end_of(child: subprocess.Popen[bytes]) -> str:
    """How a child ended whose end of the channel is closed."""
    try:
        status = await asyncio.to_thread(child.wait, _TOLD_SECONDS)
    except subprocess.TimeoutExpired:
        return "it says nothing any more"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"
