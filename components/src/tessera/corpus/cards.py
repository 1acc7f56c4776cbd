"""Engines in child processes of the run, one for each card, or one without a card."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from tessera import machine
from tessera.checkpoint.source import Source
from tessera.corpus.child import Child, ChildLost
from tessera.corpus.columns import Columns
from tessera.corpus.embedder import Served, Usage, VectorSettings
from tessera.corpus.frames import Embed, Load, Made, Ready, Start, Tell, Used
from tessera.corpus.item import Embedded, Failure, Item
from tessera.defaults import ENGINE_CONFIGS
from tessera.errors import ConfigError, EngineDead, ProtocolError, Unavailable
from tessera.models import find, open_model
from tessera.models.base import OutputKind

# Processes that end without having answered anything, one after another, before the run gives up.
_DEATHS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """How engine processes are started: what their workers load, and the cards.

    ``cards`` are entries for CUDA_VISIBLE_DEVICES, an empty one where the environment is to stay as it is.
    """

    loads: Sequence[Load]
    vectors: VectorSettings
    cards: Sequence[str] = ("",)
    log: Sequence[str] = ()


def loads_of(source: Source, passed: Sequence[str], *, engines_on_host: int, split: bool) -> list[Load]:
    """What the workers of one engine load; ``passed`` are the user's own flags, for each of them.

    ``split`` makes a worker for each stage, where the model has two. Raises ``CheckpointError``.
    """
    flags = ["--model-path", str(source.directory), "--workers-on-host", str(engines_on_host)]
    if not any(word.partition("=")[0] == "--extra-engine-args" for word in passed):
        flags += ["--extra-engine-args", str(ENGINE_CONFIGS)]
    modes = [["--disaggregation-mode", "agg"]]
    if split and open_model(source.directory, {}).vision is not None:
        modes = [["--disaggregation-mode", mode, "--workers-on-card", "2"] for mode in ("encode", "embed")]
    return [Load([*flags, *mode, *passed], source.as_json()) for mode in modes]


def plan_engines(
    named: str,
    revision: str,
    vectors: VectorSettings,
    *,
    passed: Sequence[str] = (),
    log: Sequence[str] = (),
    bar: bool = False,
    most: int | None = None,
    split: bool = False,
) -> EnginePlan:
    """An engine for each card, ``most`` of them, of the model that is named; downloads it if need be.

    ``split`` as in ``loads_of``.

    Raises ``ConfigError`` and ``CheckpointError`` for what is no model that makes vectors.
    """
    source = find(named, revision, bar=bar)
    model = open_model(source.directory, {})
    if model.output.kind is OutputKind.SCORE:
        raise ConfigError(f"{named} ({model.family}) gives scores of pairs, and no vectors")
    cards = ([card.entry for card in machine.this_machine(os.environ).cards] or [""])[:most]
    return EnginePlan(
        loads=loads_of(source, passed, engines_on_host=len(cards), split=split),
        vectors=vectors,
        cards=cards,
        log=log,
    )


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
            except ChildLost:
                return await self._suspected(items)
        finally:
            self._in_flight -= size

    async def usage(self) -> Usage:
        if self._open.is_set() and self._process is not None:
            with suppress(ChildLost):
                self._now = await self._process.usage()
        return self._before + self._now

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    async def _ask(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        if self._process is None:
            raise ChildLost("its process has ended")
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
        except ChildLost as lost:
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
    """A child that runs ``engine_process``. Its methods raise ``ChildLost``."""

    def __init__(self, child: Child, served: Served) -> None:
        self._child = child
        self.served = served

    @classmethod
    async def start(cls, plan: EnginePlan, card: str) -> Self:
        """Raises what the engine was refused for."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card} if card else None
        first = Start(list(plan.loads), plan.vectors)
        module = "tessera.corpus.engine_process"
        child = await Child.start(module, first, environment=environment, words=plan.log)
        assert isinstance(child.begun, Ready)
        return cls(child, child.begun.served)

    @property
    def ended(self) -> bool:
        return self._child.ended

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        made = await self._child.ask(lambda number: Embed(number, list(items)))
        assert isinstance(made, Made)
        rows = np.frombuffer(made.rows, "<f4").reshape(-1, self.served.width)
        if len(made.counts) != len(items) or sum(made.counts) != len(rows):
            raise ProtocolError(f"an engine answered with {len(made.counts)} of {len(items)} items")
        columns = Columns(rows=rows, counts=made.counts, tokens=made.tokens, reasons=made.reasons)
        return columns.of(items)

    async def usage(self) -> Usage:
        used = await self._child.ask(Tell)
        assert isinstance(used, Used)
        return used.usage

    async def close(self) -> None:
        await self._child.close()
