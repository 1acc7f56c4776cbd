"""Keeps engines in child processes, one for each card, or one without a card."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

from tessera.errors import EngineDead, ProtocolError, Unavailable
from tessera.local.child import Child, ChildLost
from tessera.local.content import Content
from tessera.local.messages import AskUsage, Embed, EmbeddedRows, Ready, Start, Used
from tessera.local.model_info import ModelInfo
from tessera.local.plan import EnginePlan
from tessera.local.usage import Usage
from tessera.local.vectors import Vectors
from tessera.local.wanted import DEFAULT, Wanted
from tessera.rows import Rows

# Processes that end without having answered anything, one after another, before there is none any more.
_DEATHS: Final = 5


class Engines:
    """The engines of a plan, owned by one event loop; a process that ends is started again.

    What was under way in one that ended is tried again part by part with nothing else beside it, until the
    input is found that it ends over: that one is a failure, and all others are embedded.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._engines = [_Engine(plan, card) for card in plan.cards]

    @classmethod
    async def start(cls, plan: EnginePlan) -> Self:
        """Raises ``TesseraError`` where an engine cannot be started."""
        engines = cls(plan)
        try:
            async with asyncio.TaskGroup() as group:
                for engine in engines._engines:
                    group.create_task(engine.start())
        except BaseException as error:
            await engines.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return engines

    @property
    def model(self) -> ModelInfo:
        return self._engines[0].model

    @property
    def count(self) -> int:
        """How many engines work side by side."""
        return len(self._engines)

    async def embed(self, contents: Sequence[Content], wanted: Wanted = DEFAULT) -> Vectors:
        """Embed inputs together, on the engine with the least to do; may be called several times at once.

        Raises ``TesseraError`` where nothing can be embedded.
        """
        return await min(self._engines, key=_Engine.load).embed(contents, wanted)

    async def usage(self) -> Usage:
        return sum(await asyncio.gather(*(engine.usage() for engine in self._engines)), Usage())

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class _Engine:
    """One process and its replacements."""

    def __init__(self, plan: EnginePlan, card: str) -> None:
        self._plan = plan
        self._card = card
        self._process: Child | None = None
        self._model: ModelInfo | None = None
        # Of processes that ended, as far as they were asked; and of this one.
        self._before = Usage()
        self._now = Usage()
        self._deaths = 0
        # Set while inputs may be sent; not while those are tried that the last process may have ended over.
        self._open = asyncio.Event()
        self._alone = asyncio.Lock()
        self._suspects = 0
        self._in_flight = 0

    @property
    def model(self) -> ModelInfo:
        assert self._model is not None
        return self._model

    def load(self) -> tuple[bool, int]:
        return not self._open.is_set(), self._in_flight

    async def start(self) -> None:
        self._process = await self._begin()
        assert isinstance(self._process.begun, Ready)
        self._model = self._process.begun.model
        self._open.set()

    async def embed(self, contents: Sequence[Content], wanted: Wanted) -> Vectors:
        size = sum(content.nbytes for content in contents)
        self._in_flight += size
        try:
            await self._open.wait()
            try:
                return await self._ask(contents, wanted)
            except ChildLost:
                return await self._suspected(contents, wanted)
        finally:
            self._in_flight -= size

    async def usage(self) -> Usage:
        if self._open.is_set() and self._process is not None:
            with suppress(ChildLost):
                self._now = (await self._process.ask(AskUsage, Used)).usage
        return self._before + self._now

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    async def _begin(self) -> Child:
        """Start ``engine_process``. Raises what the engine was refused for."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._card} if self._card else None
        first = Start(list(self._plan.loads), self._plan.options, self._plan.allow_private_media)
        module = "tessera.local.engine_process"
        return await Child.start(module, first, environment=environment, words=self._plan.log)

    async def _ask(self, contents: Sequence[Content], wanted: Wanted) -> Vectors:
        if self._process is None:
            raise ChildLost("its process has ended")
        answer = await self._process.ask(lambda number: Embed(number, list(contents), wanted), EmbeddedRows)
        try:
            outputs = [output.rows() for output in answer.outputs]
        except ValueError as error:
            raise ProtocolError(f"an engine answered with {error}") from error
        if any(len(rows) != len(contents) for rows in outputs):
            raise ProtocolError(f"an engine answered with {len(outputs[0])} of {len(contents)} inputs")
        self._deaths = 0
        return Vectors(
            rows=Rows.together(outputs),
            tokens=answer.tokens,
            errors={place: failure.error() for place, failure in answer.errors.items()},
        )

    async def _suspected(self, contents: Sequence[Content], wanted: Wanted) -> Vectors:
        self._open.clear()
        self._suspects += 1
        try:
            async with self._alone:
                return await self._in_parts(contents, wanted)
        finally:
            self._suspects -= 1
            if not self._suspects:
                self._open.set()

    async def _in_parts(self, contents: Sequence[Content], wanted: Wanted) -> Vectors:
        await self._start_again()
        try:
            return await self._ask(contents, wanted)
        except ChildLost as lost:
            if len(contents) > 1:
                half = len(contents) // 2
                parts = [await self._in_parts(part, wanted) for part in (contents[:half], contents[half:])]
                return Vectors.joined(parts)
            self._died(lost)
            error = EngineDead(f"the engine's process ended over it: {lost}")
            scores = wanted.query is not None
            outputs = self.model.asked(wanted.outputs, "outputs")
            return Vectors.failed([error], [1] if scores else [output.width for output in outputs])

    async def _start_again(self) -> None:
        """Where the process has ended. Raises what an engine is refused for."""
        while self._process is None or self._process.ended:
            if self._process is not None:
                await self._process.close()
                self._before, self._now = self._before + self._now, Usage()
                self._process = None
            try:
                self._process = await self._begin()
            except Unavailable as error:
                self._died(error)

    def _died(self, why: Exception) -> None:
        self._deaths += 1
        if self._deaths >= _DEATHS:
            raise EngineDead(f"{self._deaths} engine processes ended one after another: {why}") from why
