"""Embeds items with engines of this command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from tessera.local.engines import Engines
from tessera.local.model_info import ModelInfo
from tessera.local.plan import EnginePlan
from tessera.local.usage import Usage
from tessera.local.vectors import Vectors
from tessera.local.wanted import Wanted
from tessera_corpus.embedder import VectorSettings
from tessera_corpus.item import Embedded, Failure, Item


class EngineEmbedder:
    """Implements ``Embedder`` with the engines of a plan, which start for the first items.

    A run that has nothing to embed, and a query of another model, need none.
    """

    def __init__(self, plan: EnginePlan, vectors: VectorSettings, served: ModelInfo) -> None:
        """``served`` is what the engines of ``plan`` have. Raises ``InvalidInput`` for other outputs."""
        self.served = served
        self._plan = plan
        self._vectors = vectors
        self._wanted = Wanted(outputs=vectors.names(served))
        self._starting: asyncio.Task[Engines] | None = None

    @classmethod
    async def open(cls, plan: EnginePlan, vectors: VectorSettings) -> Self:
        """Raises ``TesseraError`` for what no engine can serve."""
        return cls(plan, vectors, await asyncio.to_thread(_served, plan))

    @property
    def engines(self) -> int:
        return len(self._plan.cards)

    async def ready(self) -> None:
        """Raises ``TesseraError`` where an engine cannot be started."""
        await self._started()

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        engines = await self._started()
        contents = [self._vectors.content_of(item) for item in items]
        return outcomes(items, await engines.embed(contents, self._wanted))

    async def usage(self) -> Usage:
        starting = self._starting
        return await starting.result().usage() if starting is not None and _begun(starting) else Usage()

    async def close(self) -> None:
        if (starting := self._starting) is None:
            return
        starting.cancel()
        await asyncio.wait([starting])
        if _begun(starting):
            await starting.result().close()

    async def _started(self) -> Engines:
        if self._starting is None:
            self._starting = asyncio.create_task(Engines.start(self._plan))
        return await asyncio.shield(self._starting)


def _begun(starting: asyncio.Task[Engines]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None


def _served(plan: EnginePlan) -> ModelInfo:
    # Not for a service's clients, who have none of what it imports.
    from tessera.local.description import model_of

    return model_of(plan.loads[-1], plan.options)


def outcomes(items: Sequence[Item], vectors: Vectors) -> list[Embedded | Failure]:
    """Return each of the items with what it became."""
    results: list[Embedded | Failure] = []
    for place, (item, rows, tokens) in enumerate(zip(items, vectors, vectors.tokens, strict=True)):
        if (error := vectors.errors.get(place)) is not None:
            results.append(item.failed(f"{error.code}: {error.message}"))
        else:
            results.append(item.embedded(rows, tokens))
    return results
