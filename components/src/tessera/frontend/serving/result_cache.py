"""A cache of output rows, and single flight for equal inputs that are asked for at the same time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tessera import tracing, wire
from tessera.cache import BoundedLru, SharedCache, SingleFlight
from tessera.errors import DeadlineExceeded, RequestError, TesseraError, Unavailable
from tessera.frontend.metrics import ModelMetrics
from tessera.frontend.serving.dispatch import Answer, Embedder
from tessera.logs import note
from tessera.models.base import SCORES, Output, RowKind
from tessera.tasks import Deadline, run_all


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


# What an entry takes beside its rows: its key, the objects around the arrays and the table's share.
_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class _Entry:
    """An input's rows, float32 ``[rows, width]``, and the norms that they had, float32 ``[rows]``."""

    rows: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.norms.nbytes + _ENTRY_BYTES


class Entries(Protocol):
    """Where entries are kept, within bytes; those that were used least recently make room."""

    @property
    def used(self) -> int: ...
    def get(self, key: bytes) -> _Entry | None: ...
    def put(self, key: bytes, value: _Entry) -> object: ...


# How many values each of an entry's rows has.
_WIDTH = struct.Struct("<I")


class SharedEntries:
    """Entries that all frontends of a group keep for each other."""

    def __init__(self, cache: SharedCache) -> None:
        self._cache = cache

    @property
    def used(self) -> int:
        return self._cache.used

    def get(self, key: bytes) -> _Entry | None:
        if (found := self._cache.get(key)) is None:
            return None
        (width,) = _WIDTH.unpack_from(found)
        values = np.frombuffer(found, np.float32, offset=_WIDTH.size)
        count = len(values) // (width + 1)
        return _Entry(values[count:].reshape(count, width), values[:count])

    def put(self, key: bytes, value: _Entry) -> None:
        width = _WIDTH.pack(value.rows.shape[1])
        self._cache.put(key, b"".join((width, value.norms.tobytes(), value.rows.tobytes())))


@dataclass(frozen=True, slots=True)
class _Computed:
    entry: _Entry
    cached_tokens: int
    timings: wire.Timings


class ResultCache:
    """A byte-bounded, least-recently-used cache in front of a dispatcher; owned by one event loop.

    A key is the hash of everything the rows depend on: ``key_prefix`` (the model's fingerprint and the
    workers' number types, asked for anew with each request), the tokens, the images' contents and their
    grids. Errors are not kept. A flight outlives the request that began it for as long as another one waits
    for it, so it has ``flight_seconds`` instead of that request's deadline. ``entries`` are those of a
    group of frontends, whose flights stay each one's own.
    """

    def __init__(
        self,
        dispatcher: Embedder,
        metrics: ModelMetrics,
        *,
        capacity: int,
        output: Output,
        key_prefix: Callable[[], bytes],
        flight_seconds: float,
        workers: Callable[[], int] = lambda: 1,
        entries: Entries | None = None,
    ) -> None:
        self._workers = workers
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._output = output
        self._key_prefix = key_prefix
        self._flight_seconds = flight_seconds
        self._flights: SingleFlight[_Computed] = SingleFlight()
        own: BoundedLru[bytes, _Entry] = BoundedLru(capacity, lambda entry: entry.nbytes)
        self._entries: Entries = own if entries is None else entries
        metrics.watch_result_cache(lambda: self.nbytes)

    @property
    def nbytes(self) -> int:
        return self._entries.used

    async def embed(
        self,
        items: Sequence[wire.Item],
        *,
        request_id: str,
        priority: int,
        client: str,
        deadline: Deadline,
        queries: Sequence[bytes] = (),
        rows: RowKind = RowKind.OUTPUT,
    ) -> Answer:
        """As ``Dispatcher.embed``; what is not cached goes to the workers in one batch.

        Rows of a stage are not kept: those of a page take 20 MB.
        """
        if rows is not RowKind.OUTPUT:
            return await self._dispatcher.embed(
                items, request_id=request_id, priority=priority, client=client, deadline=deadline, rows=rows
            )
        answer = Answer.empty(items, SCORES if queries else self._output)
        prefix = self._key_prefix()
        compared = [blake3(query).digest() for query in queries]
        keys = [_key(prefix, item, compared[item.query] if compared else b"") for item in items]
        missing: list[int] = []
        for index, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None:
                missing.append(index)
            else:
                _put(answer, index, entry)
                answer.cached_tokens[index] = _image_tokens(items[index])
        self._metrics.result_cache["hit"].inc(len(items) - len(missing))
        note(result_cache_hits=len(items) - len(missing))
        tracing.annotate({"tessera.result_cache.hits": len(items) - len(missing)})
        if missing:
            batch = _Batch(self._dispatcher, request_id, priority, client, self._flight_seconds, queries)
            calls = [self._compute(keys[index], items[index], batch, deadline) for index in missing]
            for index, outcome in zip(missing, await run_all(calls), strict=True):
                if isinstance(outcome, TesseraError):
                    answer.errors[index] = outcome
                else:
                    _put(answer, index, outcome.entry)
                    answer.cached_tokens[index] = outcome.cached_tokens
                    answer.timings = answer.timings.merge(outcome.timings)
        return answer

    async def _compute(
        self, key: bytes, item: wire.Item, batch: _Batch, deadline: Deadline
    ) -> _Computed | TesseraError:
        ours = False

        def begin() -> Awaitable[_Computed]:
            nonlocal ours
            ours = True
            return self._keep(key, batch, batch.add(item))

        try:
            async with asyncio.timeout(deadline.left()):
                computed = await self._flights.run(key, begin)
        except TimeoutError:
            if not self._workers():
                # The dispatcher would have said so had the request's time been as long as its own wait.
                return Unavailable("no embed worker is available", param=item.param, retry_after=1.0)
            return DeadlineExceeded("the request was not answered in time", param=item.param)
        except RequestError as error:
            # Another request's error speaks of that request's inputs, so this one asks for its own.
            return error if ours else await self._alone(item, batch, deadline)
        except TesseraError as error:
            if ours or error.param is None:
                return error
            # The flight was another request's, whose name for the input says nothing here.
            return error.named(item.param)
        self._metrics.result_cache["miss" if ours else "joined"].inc()
        return computed

    async def _alone(self, item: wire.Item, batch: _Batch, deadline: Deadline) -> _Computed | TesseraError:
        answer = await self._dispatcher.embed(
            [item],
            request_id=batch.request_id,
            priority=batch.priority,
            client=batch.client,
            deadline=deadline,
            queries=batch.queries,
        )
        return answer.errors.get(0) or _computed(answer, 0)

    async def _keep(self, key: bytes, batch: _Batch, position: int) -> _Computed:
        computed = await batch.portion(position)
        entry = computed.entry
        # A copy: the rows would keep their whole batch alive.
        self._entries.put(key, _Entry(entry.rows.copy(), entry.norms.copy()))
        return computed


class _Batch:
    """The items of one request that are in no flight yet; one call, cancelled with its last waiter."""

    def __init__(
        self,
        dispatcher: Embedder,
        request_id: str,
        priority: int,
        client: str,
        seconds: float,
        queries: Sequence[bytes],
    ) -> None:
        self._dispatcher = dispatcher
        self._seconds = seconds
        self._items: list[wire.Item] = []
        self._task: asyncio.Task[Answer] | None = None
        self._waiting = 0
        self.request_id = request_id
        self.priority = priority
        self.client = client
        self.queries = queries

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
        return await self._dispatcher.embed(
            self._items,
            request_id=self.request_id,
            priority=self.priority,
            client=self.client,
            deadline=Deadline.after(self._seconds),
            queries=self.queries,
        )


def _computed(answer: Answer, position: int) -> _Computed:
    rows = slice(answer.bounds[position], answer.bounds[position + 1])
    entry = _Entry(answer.rows[rows], answer.norms[rows])
    return _Computed(entry, answer.cached_tokens[position], answer.timings)


def _put(answer: Answer, position: int, entry: _Entry) -> None:
    rows = slice(answer.bounds[position], answer.bounds[position + 1])
    answer.rows[rows], answer.norms[rows] = entry.rows, entry.norms


def _image_tokens(item: wire.Item) -> int:
    return sum(image.rows for image in item.images if isinstance(image, wire.Image))


def _key(prefix: bytes, item: wire.Item, compared: bytes) -> bytes:
    hasher = blake3(prefix)
    hasher.update(compared)
    hasher.update(len(item.tokens).to_bytes(8, "little"))
    hasher.update(item.tokens)
    for image in item.images:
        # An image file's hash cannot be that of a tensor file, and the tokens hold how many rows each has. A
        # tensor's grid may have come beside its file.
        hasher.update(image.digest)
        hasher.update(repr(image.grid).encode())
    return hasher.digest()
