"""The two stages of a pipeline, each an actor's: reading and drawing, and embedding."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from tessera.errors import ConfigError, EngineDead
from tessera.local.model_info import ModelInfo
from tessera.local.plan import loads_of
from tessera.local.wanted import Wanted
from tessera.models import find, open_model
from tessera.models.base import OutputKind
from tessera.process_exit import ENGINE_DEAD, leave
from tessera_corpus.documents import Documents, DocumentSettings
from tessera_corpus.embedder import VectorSettings
from tessera_corpus.engines import outcomes
from tessera_corpus.item import Embedded, Failure, Item, unique
from tessera_corpus.pdf import PictureFormat
from tessera_corpus.ray.blocks import LeftOut, Row, block_of, rows_of
from tessera_corpus.run import Progress, fresh, take
from tessera_corpus.shard import Shard
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.settings import SourceSettings

log = logging.getLogger("tessera.corpus.ray")

T = TypeVar("T")

# Calls of the engine under way, of 64 items at most each.
_CALLS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader reads; ``directory`` is where the command was given."""

    directory: str
    words: Sequence[str]
    source: SourceSettings
    documents: DocumentSettings
    honoured: Honoured


class Reader:
    """Reads shards of the sources: rows in the same order each time, so that a task can be done again."""

    def __init__(self, reading: Reading, known: Any) -> None:
        """``known`` is a reference to the output's ``Known`` in Ray's object store."""
        import ray

        os.chdir(reading.directory)
        self._reading = reading
        # Mapped from the object store, one copy for a machine.
        self._known = ray.get(known)
        # An actor holds one CPU; and pages cross the network.
        documents = msgspec.structs.replace(reading.documents, processes=reading.documents.processes or 1)
        self._documents = Documents(documents, PictureFormat.PNG)

    def __call__(self, block: Any) -> Iterator[Any]:
        """Blocks of rows of the shards named in the columns ``number`` and ``count``."""
        for number, count in zip(block["number"].to_pylist(), block["count"].to_pylist(), strict=True):
            yield from self._shard(Shard(number, count))

    def _shard(self, shard: Shard) -> Iterator[Any]:
        reading, left_out = self._reading, list[tuple[str, bytes]]()
        settings = msgspec.structs.replace(reading.source, shard_text=f"{shard.number}/{shard.count}")
        source = open_source(reading.words, settings, reading.honoured)

        def done(id: str, content_hash: bytes) -> bool:
            if found := self._known.has(id, content_hash):
                left_out.append((id, content_hash))
            return bool(found)

        rows = fresh(self._documents.pages(unique(source.rows()), done), done, Progress())
        while taken := take(rows):
            yield block_of([*taken, LeftOut(left_out[:])])
            left_out.clear()
        passed_over = dict(source.passed_over())
        if left_out or passed_over:
            yield block_of([LeftOut(left_out, passed_over)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The engine of an embedding actor; ``model`` is found again on the machine that the actor is on."""

    directory: str
    model: str
    revision: str
    passed: Sequence[str]
    split: bool
    engines_on_host: int
    vectors: VectorSettings
    served: ModelInfo


class EngineActor:
    """An engine on an event loop of its own, with the blocks of several tasks under way."""

    def __init__(self, embedding: Embedding) -> None:
        from tessera.local.engine import Engine

        os.chdir(embedding.directory)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        source = find(embedding.model, embedding.revision)
        loads = loads_of(
            source,
            embedding.passed,
            engines_on_host=embedding.engines_on_host,
            split=embedding.split,
        )
        self._vectors = embedding.vectors
        self._wanted = Wanted(outputs=embedding.vectors.names(embedding.served))
        self._engine = self._wait(Engine.start(loads, embedding.vectors.options, _died))
        if self._engine.model.fingerprint != embedding.served.fingerprint:
            raise ConfigError(
                f"{embedding.model} is another model on this machine than where the run was started"
            )
        self._room = asyncio.Semaphore(_CALLS)

    def __call__(self, block: Any) -> Any:
        """One block for each, in the order of its rows."""
        return block_of(self._wait(self._embed(list(rows_of(block)))))

    async def _embed(self, rows: Sequence[Row]) -> list[Row]:
        items = iter([row for row in rows if isinstance(row, Item)])
        calls = []
        while taken := take(items):
            calls.append(self._call([row for row in taken if isinstance(row, Item)]))
        made = [row for some in await asyncio.gather(*calls) for row in some]
        return [*(row for row in rows if not isinstance(row, Item)), *made]

    async def _call(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        async with self._room:
            contents = [self._vectors.content_of(item) for item in items]
            return outcomes(items, await self._engine.embed(contents, self._wanted))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def served_here(model: str, revision: str, passed: Sequence[str], vectors: VectorSettings) -> ModelInfo:
    """What engines will serve, found without one. Raises ``ConfigError`` and ``CheckpointError``."""
    from tessera.local.description import model_of

    source = find(model, revision)
    opened = open_model(source.directory, {})
    if opened.output.kind is OutputKind.SCORE:
        raise ConfigError(f"{opened.family} gives scores of pairs: a corpus needs a model that makes vectors")
    return model_of(loads_of(source, passed, engines_on_host=1, split=False)[-1], vectors.options)


def _died(error: EngineDead) -> None:
    """Ray starts the actor again, and does its tasks again."""
    log.critical("leaving: %s", error)
    leave(ENGINE_DEAD)
