"""Embeds items with engines of this command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from tessera.local.engines import Engines
from tessera.local.model_info import ModelInfo
from tessera.local.plan import EnginePlan
from tessera.local.usage import Usage
from tessera.local.vectors import Vectors
from tessera_corpus.embedder import VectorSettings
from tessera_corpus.item import Embedded, Failure, Item


class EngineEmbedder:
    """Implements ``Embedder`` with the engines of a plan."""

    def __init__(self, engines: Engines, vectors: VectorSettings) -> None:
        self._engines = engines
        self._vectors = vectors

    @classmethod
    async def start(cls, plan: EnginePlan, vectors: VectorSettings) -> Self:
        """Raises ``TesseraError`` where an engine cannot be started."""
        return cls(await Engines.start(plan), vectors)

    @property
    def served(self) -> ModelInfo:
        return self._engines.model

    @property
    def engines(self) -> int:
        return self._engines.count

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        return outcomes(items, await self._engines.embed([self._vectors.content_of(item) for item in items]))

    async def usage(self) -> Usage:
        return await self._engines.usage()

    async def close(self) -> None:
        await self._engines.close()


def outcomes(items: Sequence[Item], vectors: Vectors) -> list[Embedded | Failure]:
    """Return each of the items with what it became."""
    results: list[Embedded | Failure] = []
    for place, (item, rows, tokens) in enumerate(zip(items, vectors, vectors.tokens, strict=True)):
        if (error := vectors.errors.get(place)) is not None:
            results.append(item.failed(f"{error.code}: {error.message}"))
        else:
            results.append(item.embedded(rows, tokens))
    return results
