"""A cache of output rows, and single flight for equal inputs that are asked for at the same time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from blake3 import blake3

from tessera import tracing, wire
from tessera.cache import BoundedLru, SharedCache
from tessera.errors import RequestError, TesseraError, Unavailable
from tessera.frontend.metrics import ModelMetrics
from tessera.frontend.serving.dispatch import NO_SALT, Answer, Call, Embedder, Salt
from tessera.logs import note
from tessera.models.base import STATES, VISION, Outputs
from tessera.rows import Rows
from tessera.tasks import Deadline, SingleFlight, run_all


class KeyPrefix:
    """The part of every key that changes when the same input may get other rows.

    ``workers`` gives those that are there of each component; where none is, its last ones count.
    """

    def __init__(self, fingerprint: str, *workers: Callable[[], Iterable[wire.WorkerInfo]]) -> None:
        self._fingerprint = fingerprint
        self._workers = workers
        self._last: list[list[str]] = [[] for _ in workers]

    def __call__(self) -> bytes:
        for number, workers in enumerate(self._workers):
            # Workers of the same checkpoint may run it in another number type, or rounded further.
            if found := sorted({f"{info.dtype}\0{info.rounding}" for info in workers()}):
                self._last[number] = found
        return "\0\0".join([self._fingerprint, *("\0".join(kinds) for kinds in self._last)]).encode()


_STAGES = frozenset((STATES, VISION))

# What an input's rows take beside themselves: their key, the objects around the arrays, the table's share.
_ENTRY_BYTES = 400


class Entries(Protocol):
    """Keeps the rows of single inputs within bytes; those that were used least recently make room."""

    @property
    def used(self) -> int: ...
    def get(self, key: bytes) -> Rows | None: ...
    def put(self, key: bytes, value: Rows) -> object: ...


# Of each output of an entry: values in a row, rows, and whether these have indices.
_SHAPE = struct.Struct("<IIB")


class SharedEntries:
    """Entries that all frontends of a group keep for each other."""

    def __init__(self, cache: SharedCache) -> None:
        self._cache = cache

    @property
    def used(self) -> int:
        return self._cache.used

    def get(self, key: bytes) -> Rows | None:
        if (entry := self._cache.get(key)) is None:
            return None
        outputs: list[Rows] = []
        start = 0
        while start < len(entry):
            width, count, indexed = _SHAPE.unpack_from(entry, start)
            start += _SHAPE.size
            columns = 1 + width + indexed
            values = np.frombuffer(entry, np.float32, count * columns, start)
            start += 4 * count * columns
            norms, values = values[:count], values[count:]
            rows = values[: count * width].reshape(count, width)
            indices = values[count * width :].view(np.int32) if indexed else None
            outputs.append(Rows(rows, np.array((0, count), np.int64), norms, indices))
        return Rows.together(outputs)

    def put(self, key: bytes, value: Rows) -> None:
        parts: list[bytes] = []
        for rows in value.each():
            indexed = rows.indices is not None
            parts += (_SHAPE.pack(rows.width, len(rows.values), indexed), rows.norms.tobytes())
            parts.append(rows.values.tobytes())
            if rows.indices is not None:
                parts.append(rows.indices.tobytes())
        self._cache.put(key, b"".join(parts))


@dataclass(frozen=True, slots=True)
class _Computed:
    """What became of one input."""

    rows: Rows
    cached_tokens: int
    timings: wire.Timings


class ResultCache:
    """A byte-bounded, least-recently-used cache in front of a dispatcher; owned by one event loop.

    A key is the hash of everything the rows depend on: ``key_prefix`` (the model's fingerprint and the
    workers' number types, asked for anew with each request), the request's ``salt`` and the names of the
    outputs that it asks for, the tokens, the bounds of chunks, the images'
    contents and their grids. Errors are not kept. A flight outlives the request that began it for as long as
    another one waits for it, so it has ``flight_seconds`` instead of that request's deadline. ``entries`` are
    those of a group of frontends, whose flights stay each one's own.
    """

    def __init__(
        self,
        dispatcher: Embedder,
        metrics: ModelMetrics,
        *,
        capacity: int,
        outputs: Outputs,
        key_prefix: Callable[[], bytes],
        flight_seconds: float,
        workers: Callable[[], int] = lambda: 1,
        entries: Entries | None = None,
        salt: Salt = NO_SALT,
    ) -> None:
        self._workers = workers
        self._salt = salt
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._outputs = outputs
        self._key_prefix = key_prefix
        self._flight_seconds = flight_seconds
        self._flights: SingleFlight[_Computed] = SingleFlight()
        own: BoundedLru[bytes, Rows] = BoundedLru(capacity, lambda rows: rows.nbytes + _ENTRY_BYTES)
        self._entries: Entries = own if entries is None else entries
        metrics.watch_result_cache(lambda: self.nbytes)

    @property
    def nbytes(self) -> int:
        return self._entries.used

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        """As ``Dispatcher.embed``; what is not cached goes to the workers in one batch.

        Rows of a stage are not kept: those of a page take 20 MB.
        """
        if not _STAGES.isdisjoint(call.outputs):
            return await self._dispatcher.embed(items, call)
        answer = Answer.empty(items, *call.outputs_of(self._outputs))
        prefix = self._key_prefix() + self._salt(call) + "\0".join(call.outputs).encode()
        compared = [blake3(query).digest() for query in call.queries]
        keys = [_key(prefix, item, compared[item.query] if compared else b"") for item in items]
        missing: list[int] = []
        for index, key in enumerate(keys):
            rows = self._entries.get(key)
            if rows is None:
                missing.append(index)
            else:
                answer.rows = answer.rows.put([index], rows)
                answer.cached_tokens[index] = _image_tokens(items[index])
        self._metrics.result_cache["hit"].inc(len(items) - len(missing))
        note(result_cache_hits=len(items) - len(missing))
        tracing.annotate({"tessera.result_cache.hits": len(items) - len(missing)})
        if missing:
            batch = _Batch(self._dispatcher, call, self._flight_seconds)
            flights = [self._compute(keys[index], items[index], batch) for index in missing]
            for index, outcome in zip(missing, await run_all(flights), strict=True):
                if isinstance(outcome, TesseraError):
                    answer.errors[index] = outcome
                else:
                    answer.rows = answer.rows.put([index], outcome.rows)
                    answer.cached_tokens[index] = outcome.cached_tokens
                    answer.timings = answer.timings.merge(outcome.timings)
        return answer

    async def _compute(self, key: bytes, item: wire.Item, batch: _Batch) -> _Computed | TesseraError:
        ours = False

        def begin() -> Coroutine[Any, Any, _Computed]:
            nonlocal ours
            ours = True
            return self._keep(key, batch, batch.add(item))

        try:
            async with asyncio.timeout(batch.call.deadline.left()):
                computed = await self._flights.run(key, begin)
        except TimeoutError:
            if not self._workers():
                # The dispatcher would have said so had the request's time been as long as its own wait.
                return Unavailable("no embed worker is available", param=item.param, retry_after=1.0)
            return batch.call.deadline.exceeded(item.param)
        except RequestError as error:
            # Another request's error speaks of that request's inputs, so this one asks for its own.
            return error.kept() if ours else await self._alone(item, batch.call)
        except TesseraError as error:
            if ours or error.param is None:
                return error.kept()
            # The flight was another request's, whose name for the input says nothing here.
            return error.named(item.param)
        self._metrics.result_cache["miss" if ours else "joined"].inc()
        return computed

    async def _alone(self, item: wire.Item, call: Call) -> _Computed | TesseraError:
        answer = await self._dispatcher.embed([item], call)
        return answer.errors.get(0) or _computed(answer, 0)

    async def _keep(self, key: bytes, batch: _Batch, position: int) -> _Computed:
        computed = await batch.portion(position)
        # A copy: the rows would keep their whole batch alive.
        self._entries.put(key, computed.rows.copied())
        return computed


class _Batch:
    """The items of one request that are in no flight yet; one call, cancelled with its last waiter."""

    def __init__(self, dispatcher: Embedder, call: Call, seconds: float) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._items: list[wire.Item] = []
        self._task: asyncio.Task[Answer] | None = None
        self._waiting = 0
        self.call = call

    def add(self, item: wire.Item) -> int:
        assert self._task is None, "every item is added before the first portion is awaited"
        self._items.append(item)
        return len(self._items) - 1

    async def portion(self, position: int) -> _Computed:
        if self._task is None:
            self._task = asyncio.ensure_future(self._send())
        self._waiting += 1
        try:
            answer = await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self._task.done():
                self._task.cancel()
        if position in answer.errors:
            raise answer.errors[position]
        return _computed(answer, position)

    async def _send(self) -> Answer:
        call = msgspec.structs.replace(self.call, deadline=Deadline.after(self._seconds))
        return await self._dispatcher.embed(self._items, call)


def _computed(answer: Answer, position: int) -> _Computed:
    return _Computed(answer.rows.of(position), answer.cached_tokens[position], answer.timings)


def _image_tokens(item: wire.Item) -> int:
    return sum(image.rows for image in item.images if isinstance(image, wire.Image))


def _key(prefix: bytes, item: wire.Item, compared: bytes) -> bytes:
    hasher = blake3(prefix)
    hasher.update(compared)
    hasher.update(len(item.tokens).to_bytes(8, "little"))
    hasher.update(item.tokens)
    # An item with chunks has no images.
    hasher.update(item.chunks)
    for image in item.images:
        # An image file's hash cannot be that of a tensor file, and the tokens hold how many rows each has. A
        # tensor's grid may have come beside its file.
        hasher.update(image.digest)
        hasher.update(repr(image.grid).encode())
    return hasher.digest()
