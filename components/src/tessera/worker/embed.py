"""The embed role: items in, output rows out. Vision rows come from the cache or from a ``VisionSource``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tessera import tracing, wire
from tessera.batching import Batcher, Entry, Events, Outcome
from tessera.engine.base import TextEngine
from tessera.engine.batch import PackedInput, TextOutput, pack
from tessera.engine.settings import EngineSettings
from tessera.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    InvalidInput,
    Overloaded,
    ProtocolError,
    TesseraError,
    UnsupportedOperation,
)
from tessera.launched import Launched
from tessera.models.base import SCORES, Model, Output, OutputKind, RowKind, stage_outputs
from tessera.tasks import run_all
from tessera.worker.frontend_shares import FrontendShares
from tessera.worker.image_rows import EncodedImage, ImageRows, Job, RequestImages
from tessera.worker.max_sim import MaxSim
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.soundness import fault, faulty_rows

F = TypeVar("F", bound=asyncio.Future)  # type: ignore[type-arg]

# How long an input waits before it asks for room again when no other of its request is under way.
_PAUSE_SECONDS = 0.01


class InputWindow(Generic[F]):
    """Begins a request's inputs in order, and bounds the size of those that are not finished.

    A request is refused as a whole or not at all: once its first input is in the queue, the others wait for
    room, for as long as the request has time.
    """

    def __init__(self) -> None:
        self.begun: list[F | TesseraError] = []
        self._unfinished: dict[F, int] = {}
        self._size = 0
        self._admitted = False

    async def add(self, begin: Callable[[], F], size: int, *, window: int) -> None:
        """Begin an input of that size; raises ``Overloaded`` when the first one is refused."""
        while self._unfinished and self._size + size > window:
            await self._one()
        while True:
            try:
                begun = begin()
                break
            except Overloaded:
                if not self._admitted:
                    raise
            await (self._one() if self._unfinished else asyncio.sleep(_PAUSE_SECONDS))
        self._admitted = True
        self.begun.append(begun)
        self._unfinished[begun] = size
        self._size += size

    def fail(self, error: TesseraError) -> None:
        self.begun.append(error)

    async def finish(self) -> None:
        """Wait for all of them; their errors stay in them."""
        if self._unfinished:
            await asyncio.wait(self._unfinished)

    def cancel(self) -> None:
        """Cancel what is not done."""
        for one in self.begun:
            if not isinstance(one, TesseraError) and not one.cancel() and not one.cancelled():
                # asyncio complains of an error that is not retrieved.
                one.exception()

    async def _one(self) -> None:
        done, _ = await asyncio.wait(self._unfinished, return_when=asyncio.FIRST_COMPLETED)
        self._size -= sum(self._unfinished.pop(one) for one in done)


_INT32, _UINT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f4")

Rows = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""The output rows of one item ``[rows, width]`` and their norms ``[rows]``."""


class EmbedService:
    """Answers ``EmbedRequest``, ``Describe`` and ``Inspect``, in the embed and the aggregated role alike.

    ``images`` is None for a model that reads text alone.
    """

    def __init__(
        self,
        model: Model,
        engine: TextEngine,
        config: EngineSettings,
        images: ImageRows | None,
        metrics: WorkerMetrics,
        info: wire.WorkerInfo,
        *,
        died: Callable[[EngineDead], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._info = info
        self.in_flight = 0
        # Looked up once: they are used for every request.
        self.loop = asyncio.get_running_loop()
        self._outputs = {RowKind.OUTPUT: model.output, **stage_outputs(model)}
        self._output = model.output
        self._width = model.output.width
        self._vocab_size = model.vocab_size
        self._answered = metrics.items.labels("embed", "ok")
        self._queued = metrics.queued("text")
        self._shares = FrontendShares()
        self._images = images
        self._max_sim = MaxSim() if model.output.kind is OutputKind.TOKENS else None

        self._gives_states = engine.gives_states

        def launch(inputs: Sequence[PackedInput]) -> Launched[list[Rows]]:
            if any(entry.states for entry in inputs):
                return _launch_apart(engine, inputs)
            return engine.launch(pack(inputs)).map(TextOutput.by_sequence)

        self.batcher: Batcher[PackedInput, Rows] = Batcher(
            "text",
            launch,
            cost=engine.cost,
            budget=config.max_batch_cost,
            max_queued=config.max_queue_cost,
            max_wait=config.max_queue_seconds,
            depth=engine.depth,
            events=Events(
                ran=metrics.batch("text"),
                cancelled=metrics.cancelled("text"),
                died=died,
                attributes=_attributes,
            ),
        )
        self._batch_cost = config.max_batch_cost
        metrics.watch_queue(
            "text", lambda: float(self.batcher.queued), limit=lambda: float(self.batcher.limit)
        )
        metrics.watch_in_flight("text", lambda: float(self.in_flight))

    @property
    def model(self) -> Model:
        return self._model

    def handle(self, request: wire.Request) -> Awaitable[wire.Reply]:
        """The reply to come: a future where nothing has to be waited for on the way to the queue."""
        if not isinstance(request, wire.EmbedRequest):
            return self._tell(request)
        return self._at_once(request) or self._in_turn(request)

    async def _tell(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Describe):
            share, images = self._shares.of(request.caller), self._images
            return msgspec.structs.replace(
                self._info,
                tokens=share.of(self.batcher.capacity, least=self._batch_cost),
                units=0 if images is None else share.of(images.units, least=images.max_units),
            )
        if isinstance(request, wire.Inspect):
            return self._metrics.state()
        raise ProtocolError(f"an embed worker does not answer {type(request).__name__}")

    def _at_once(self, request: wire.EmbedRequest) -> _AtOnce | None:
        """Queue a request whose inputs all have room now.

        None for one with queries, with an image whose rows are not in the cache, or that has to wait.
        """
        if request.queries or request.rows != "output":
            return None
        tokens = 0
        images: list[wire.Image | wire.Embeddings] = []
        for item in request.items:
            images += item.images
            tokens += item.token_count
        if tokens > self._window:
            return None
        # What is refused looks up no image.
        if (images or len(request.items) > 1) and not self.batcher.admits(tokens, request.client):
            return None
        if not images:
            return _AtOnce(self, request, tokens, ())
        if self._images is None or (vision := self._images.cached(images)) is None:
            return None
        return _AtOnce(self, request, tokens, vision)

    async def _in_turn(self, request: wire.EmbedRequest) -> wire.EmbedReply:
        tokens = sum(item.token_count for item in request.items)
        self.in_flight += tokens
        try:
            async with asyncio.timeout(request.timeout_ms / 1e3):
                return await self._embed(request)
        except TimeoutError as error:
            self.count(DeadlineExceeded.code, len(request.items))
            raise DeadlineExceeded("the request was not answered in time") from error
        except Overloaded as error:
            self.count(error.code, len(request.items))
            raise
        except asyncio.CancelledError:
            self.count("cancelled", len(request.items))
            raise
        finally:
            self.in_flight -= tokens

    def count(self, outcome: str, inputs: int) -> None:
        self._metrics.items.labels("embed", outcome).inc(inputs)

    @property
    def _window(self) -> int:
        """What one request may have waiting: it shares the queue, however large it is."""
        return max(self._batch_cost, self.batcher.limit // 4)

    def running_seconds(self) -> float:
        """How long an engine has been busy with one batch."""
        seconds = self.batcher.running_seconds
        return seconds if self._images is None else max(seconds, self._images.running_seconds)

    async def drain(self, timeout: float) -> None:
        """Return at once: peers read nothing of this worker's memory."""

    async def close(self) -> None:
        await self.batcher.close()
        if self._max_sim is not None:
            self._max_sim.close()
        if self._images is not None:
            await self._images.close()

    async def _embed(self, request: wire.EmbedRequest) -> wire.EmbedReply:
        job = Job(
            request_id=request.request_id,
            deadline=time.monotonic() + request.timeout_ms / 1e3,
            client=request.client,
            priority=request.priority,
        )
        # Text goes into the queue at once, in order and without a task for each: requests with many short
        # inputs are the ones where that cost shows.
        window: InputWindow[_Pending] = InputWindow()
        queries = self._queries(request)
        kind = RowKind(request.rows)
        self._check_kind(kind, request)
        output = SCORES if queries else self._outputs[kind]
        images = None if self._images is None else RequestImages(self._images, job, request.items)
        try:
            for item in request.items:
                try:
                    packed = self.read(item)
                except TesseraError as error:
                    window.fail(error)
                    continue
                query = queries[item.query] if queries else None
                if kind is RowKind.STATES:
                    packed = replace(packed, states=True)
                begin = partial(self._begin, job, item, packed, images, query)
                if kind is RowKind.VISION:
                    begin = partial(self._begin_vision, item, images)
                await window.add(begin, len(packed.tokens), window=self._window)
            await window.finish()
        except BaseException:
            window.cancel()
            raise
        finally:
            if images is not None:
                images.close()
        settled = [_settled(begun) for begun in window.begun]
        return self.reply(settled, [item.param for item in request.items], output)

    def _check_kind(self, kind: RowKind, request: wire.EmbedRequest) -> None:
        """Raise for rows that nothing here gives."""
        if kind is not RowKind.OUTPUT and request.queries:
            raise ProtocolError(f"queries came with a request for rows of kind {kind.value}")
        if kind is RowKind.STATES and not (self._gives_states and kind in self._outputs):
            raise UnsupportedOperation(
                "the text engine of this service gives no hidden states; they need engine: torch"
            )
        if kind is RowKind.VISION:
            if kind not in self._outputs:
                raise UnsupportedOperation("the model reads text alone: it has no vision rows")
            for item in request.items:
                # That there are as many placeholders as rows is checked as for any item.
                if item.token_count != sum(image.plan.rows for image in item.images):
                    raise InvalidInput("the tokens are not the images' placeholders alone", param=item.param)

    def _begin_vision(self, item: wire.Item, images: RequestImages | None) -> _Pending:
        assert images is not None
        return asyncio.ensure_future(self._vision(item, images))

    async def _vision(self, item: wire.Item, images: RequestImages) -> _Embedded:
        """The rows of an item's images, for a client that asks for no more."""
        encoded = await run_all([images.get(image) for image in item.images])
        rows = await asyncio.to_thread(_host_rows, [image.rows for image, _ in encoded])
        timings = wire.Timings()
        for image, was_cached in encoded:
            timings = timings if was_cached else timings.merge(image.timings)
        cached = sum(len(image.rows) for image, was_cached in encoded if was_cached)
        return _Embedded(rows, np.ones(len(rows), np.float32), cached, timings)

    def _queries(self, request: wire.EmbedRequest) -> list[npt.NDArray[np.float32]]:
        """The rows of each query ``[rows, width]``."""
        if not request.queries:
            return []
        if self._max_sim is None:
            raise ProtocolError("queries came with items that do not become a row for each token")
        if any(not query or len(query) % (4 * self._width) for query in request.queries):
            raise ProtocolError(f"a query is not of rows of {self._width} float32 values")
        if any(not 0 <= item.query < len(request.queries) for item in request.items):
            raise ProtocolError(f"an item names none of the {len(request.queries)} queries")
        # Copies: torch warns of memory that it might not write to.
        return [np.frombuffer(query, _FLOAT32).reshape(-1, self._width).copy() for query in request.queries]

    def _begin(
        self,
        job: Job,
        item: wire.Item,
        packed: PackedInput,
        images: RequestImages | None,
        query: npt.NDArray[np.float32] | None,
    ) -> _Pending:
        if query is None and not item.images:
            return self.batcher.submit(packed, len(packed.tokens), client=job.client, priority=job.priority)
        # Asked before the images cost anything, and not again when their rows are there.
        self.batcher.check(len(packed.tokens), job.client)
        return asyncio.ensure_future(self._embed_in_steps(job, item, packed, images, query))

    def reply(
        self,
        settled: Sequence[_Embedded | TesseraError | None],
        params: Sequence[str],
        output: Output | None = None,
    ) -> wire.EmbedReply:
        """Return what became of inputs by these names, each as rows of ``output``, the model's by default.

        An input whose rows are faulty has failed, however it was computed: here is the one look at them.
        """
        output = output or self._output
        rows: list[npt.NDArray[np.float32]] = []
        norms: list[npt.NDArray[np.float32]] = []
        counts = [0] * len(settled)
        failures: dict[int, wire.Failure] = {}
        cached = [0] * len(settled)
        timings: wire.Timings | None = None
        for index, result in enumerate(settled):
            assert result is not None
            if isinstance(result, TesseraError):
                if isinstance(result, EngineFailed) and result.param is None:
                    # An engine knows no names.
                    result = result.named(params[index])
                failures[index] = wire.Failure.of(result)
                continue
            counts[index] = len(result.rows)
            rows.append(result.rows)
            norms.append(result.norms)
            cached[index] = result.cached_tokens
            timings = result.timings if timings is None else timings.merge(result.timings)
        if rows:
            values, lengths = _joined(rows), _joined(norms)
            if (faulty := faulty_rows(values, lengths, output)) is not None:
                return self.reply(_without(settled, counts, faulty, output), params, output)
        else:
            values = lengths = np.empty(0, np.float32)
        for failure in failures.values():
            self.count(failure.code, 1)
        timings = timings or wire.Timings()
        self._answered.inc(len(rows))
        self._queued(timings.queue_ms)
        return wire.EmbedReply(
            rows=_bytes(values),
            norms=_bytes(lengths),
            width=output.width,
            counts=tuple(counts),
            failures=failures,
            cached_tokens=tuple(cached),
            timings=timings,
        )

    def read(self, item: wire.Item, vision: tuple[torch.Tensor, ...] = ()) -> PackedInput:
        """The item with the ``vision`` rows of its images, or without; raises ``InvalidInput`` naming it or
        one of its images."""
        tokens = self._tokens(item)
        if not item.images:
            return PackedInput(tokens=tokens, positions=self._model.positions(tokens, ()))
        if self._images is None:
            raise InvalidInput("the model reads text alone", param=item.images[0].param)
        plans = [image.plan for image in item.images]
        index = self._model.vision_index(tokens)
        expected = sum(plan.rows for plan in plans)
        if len(index) != expected or any(plan.rows < 1 for plan in plans):
            raise InvalidInput(
                f"found {len(index)} image tokens, but the {len(item.images)} images need {expected}",
                param=item.param,
            )
        positions = self._model.positions(tokens, plans)
        return PackedInput(tokens=tokens, positions=positions, vision_index=index, vision=vision)

    def _tokens(self, item: wire.Item) -> npt.NDArray[np.int32]:
        if not item.tokens or len(item.tokens) % 4:
            raise InvalidInput("the tokens are empty or not int32", param=item.param)
        unsigned = np.frombuffer(item.tokens, _UINT32)
        tokens = unsigned.view(_INT32)
        # An id outside the table would read foreign memory on a GPU.
        # A negative one is a large one when it is read as unsigned.
        if np.maximum.reduce(unsigned) >= self._vocab_size:
            raise InvalidInput(f"token ids must be in 0..{self._vocab_size - 1}", param=item.param)
        if len(tokens) > self._model.max_tokens:
            raise InvalidInput(
                f"{len(tokens)} tokens are more than the model's {self._model.max_tokens}", param=item.param
            )
        return tokens

    async def _embed_in_steps(
        self,
        job: Job,
        item: wire.Item,
        packed: PackedInput,
        images: RequestImages | None,
        query: npt.NDArray[np.float32] | None,
    ) -> _Embedded:
        """An item that waits for its images' rows before its turn, or for its score after it."""
        encoded: list[tuple[EncodedImage, bool]] = []
        if images is not None:
            encoded = await run_all([images.get(image) for image in item.images])
        outcome = await self.batcher.submit(
            replace(packed, vision=tuple(image.rows for image, _ in encoded)),
            len(packed.tokens),
            client=job.client,
            priority=job.priority,
            admitted=True,
        )
        cached = 0
        timings = wire.Timings(queue_ms=outcome.queue_ms, embed_ms=outcome.run_ms)
        for image, was_cached in encoded:
            if was_cached:
                cached += len(image.rows)
            else:
                timings = timings.merge(image.timings)
        rows, norms = outcome.value
        if query is not None:
            assert self._max_sim is not None
            if faulty_rows(rows, norms, self._output) is not None:
                raise EngineFailed(fault(self._output))
            score = await self._max_sim.score(query, rows)
            rows, norms = np.full((1, 1), score, np.float32), np.ones(1, np.float32)
        return _Embedded(rows, norms, cached, timings)


class _Embedded(NamedTuple):
    """One item's rows with what they cost."""

    rows: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]
    cached_tokens: int
    timings: wire.Timings

    @classmethod
    def of(cls, outcome: Outcome[Rows], cached_tokens: int = 0) -> _Embedded:
        rows, norms = outcome.value
        timings = wire.Timings(queue_ms=outcome.queue_ms, embed_ms=outcome.run_ms)
        return cls(rows, norms, cached_tokens, timings)


_Pending = asyncio.Future[_Embedded] | asyncio.Future[Outcome[Rows]]


class _AtOnce(asyncio.Future[wire.Reply]):
    """The reply to a request of inputs that have room now; ``vision`` has the rows of all their images.

    A task for each request, with futures that it waits for under a deadline, took a tenth of a millisecond;
    here the batcher calls. The event loop is busy for 0.15 ms with an image whose rows are in the cache, and
    was for 0.19 with tasks.
    """

    def __init__(
        self, service: EmbedService, request: wire.EmbedRequest, tokens: int, vision: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(loop=service.loop)
        self._service = service
        self._tokens = tokens
        self._settled: list[_Embedded | TesseraError | None] = [None] * len(request.items)
        self._params = [item.param for item in request.items]
        self._entries: dict[int, Entry[PackedInput, Rows]] = {}
        self._timer: asyncio.TimerHandle | None = None
        service.in_flight += tokens
        try:
            self._begin(request, iter(vision))
        except Exception as error:
            self._fail(error)
            return
        if self._entries:
            self._timer = service.loop.call_later(request.timeout_ms / 1e3, self._expire)
        else:
            self._finish()

    def cancel(self, msg: object = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._end()
            self._service.count("cancelled", len(self._settled))
        return cancelled

    def _begin(self, request: wire.EmbedRequest, vision: Iterator[torch.Tensor]) -> None:
        for index, item in enumerate(request.items):
            rows = tuple([next(vision) for _ in item.images])
            try:
                packed = self._service.read(item, rows)
            except TesseraError as error:
                self._settled[index] = error
                continue
            self._entries[index] = self._service.batcher.put(
                packed,
                len(packed.tokens),
                partial(self._settle, index, sum(map(len, rows))),
                client=request.client,
                priority=request.priority,
                # What had room together is not refused one by one.
                admitted=bool(self._entries),
            )

    def _settle(self, index: int, cached: int, outcome: Outcome[Rows] | TesseraError) -> None:
        self._settled[index] = outcome if isinstance(outcome, TesseraError) else _Embedded.of(outcome, cached)
        del self._entries[index]
        if not self._entries:
            self._finish()

    def _finish(self) -> None:
        self._end()
        try:
            self.set_result(self._service.reply(self._settled, self._params))
        except Exception as error:
            # The batch that calls here is of others, too.
            self.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._end()
        if isinstance(error, Overloaded | DeadlineExceeded):
            self._service.count(error.code, len(self._settled))
        self.set_exception(error)

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the request was not answered in time"))

    def _end(self) -> None:
        """Cancel what is not settled; its tokens count no more."""
        if self._timer is not None:
            self._timer.cancel()
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            self._service.batcher.cancel(entry)
        self._service.in_flight -= self._tokens


def _host_rows(images: Sequence[torch.Tensor]) -> npt.NDArray[np.float32]:
    """``[rows, row_width]`` of several images."""
    found: npt.NDArray[np.float32] = torch.cat([rows.to("cpu", torch.float32) for rows in images]).numpy()
    return found


def _launch_apart(engine: TextEngine, inputs: Sequence[PackedInput]) -> Launched[list[Rows]]:
    """A batch in which some ask for hidden states: those apart, so that the others pay nothing for them."""
    parts = [
        (numbers, launch)
        for launch, states in ((engine.launch, False), (engine.launch_states, True))
        if (numbers := [number for number, entry in enumerate(inputs) if entry.states is states])
    ]
    launched = [launch(pack([inputs[number] for number in numbers])) for numbers, launch in parts]

    def merge(outputs: list[TextOutput]) -> list[Rows]:
        made: dict[int, Rows] = {}
        for (numbers, _), output in zip(parts, outputs, strict=True):
            made.update(zip(numbers, output.by_sequence(), strict=True))
        return [made[number] for number in range(len(inputs))]

    return Launched.every(launched).map(merge)


def _attributes(inputs: Sequence[PackedInput]) -> tracing.Attributes:
    return {
        "tessera.batch.tokens": sum(len(entry.tokens) for entry in inputs),
        "tessera.batch.rows": sum(len(rows) for entry in inputs for rows in entry.vision),
    }


def _joined(arrays: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _bytes(values: npt.NDArray[np.float32]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).data.cast("B") if values.size else memoryview(b"")


def _without(
    settled: Sequence[_Embedded | TesseraError | None],
    counts: Sequence[int],
    faulty: npt.NDArray[np.bool_],
    output: Output,
) -> list[_Embedded | TesseraError | None]:
    """The same, with an error in place of each input that has one of the ``faulty`` rows."""
    ends = np.cumsum(counts)
    return [
        EngineFailed(fault(output)) if faulty[end - count : end].any() else result
        for result, count, end in zip(settled, counts, ends.tolist(), strict=True)
    ]


def _settled(begun: _Pending | TesseraError) -> _Embedded | TesseraError:
    if isinstance(begun, TesseraError):
        return begun
    error = begun.exception()
    if error is None:
        result = begun.result()
        return _Embedded.of(result) if isinstance(result, Outcome) else result
    if isinstance(error, TesseraError):
        return error
    raise error
