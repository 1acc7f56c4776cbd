"""The embed role: items in, output rows out. Vision rows come from the cache or from a ``VisionSource``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tessera import tracing, wire
from tessera.batching import Batcher, Entry, Outcome
from tessera.batching.engine_thread import Values
from tessera.engine.base import TextEngine
from tessera.engine.batch import PackedInput, pack, scaled
from tessera.engine.settings import EngineSettings
from tessera.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    Overloaded,
    ProtocolError,
    TesseraError,
    TransportUnavailable,
)
from tessera.launched import Launched
from tessera.models.base import VISION, Model, Output, OutputKind
from tessera.rows import Rows
from tessera.tasks import Promise
from tessera.transport.lending import land
from tessera.turns import Threads
from tessera.worker.frontend_shares import FrontendShares
from tessera.worker.image_rows import ImageRows, RequestImages
from tessera.worker.items import ItemReader
from tessera.worker.max_sim import MaxSim
from tessera.worker.metrics import WorkerMetrics

# How long an input waits before it asks for room again when no other of its request is under way.
_PAUSE_SECONDS = 0.01
_NO_BYTES = memoryview(b"")
log = logging.getLogger(__name__)
_ASIDE_THREADS = 2

Embedded = tuple[Rows, int, wire.Timings]
"""An input's rows, how many of its image tokens had their rows in the cache, and the time it took."""


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
        self.model = model
        self.images = images
        self.items = ItemReader(model, images=images is not None, gives=engine.gives)
        self.images_give_output = model.vision is not None and model.vision.gives_output
        self.max_sim = MaxSim() if model.output.kind is OutputKind.TOKENS else None
        self.in_flight = 0
        self._info = info
        self._metrics = metrics
        self._shares = FrontendShares()
        self._batch_cost = config.max_batch_cost
        # Looked up once: they are used for every request.
        self.loop = asyncio.get_running_loop()
        self.aside = Threads(_ASIDE_THREADS, "aside", spare=1)
        self.answered = metrics.items.labels("embed", "ok").inc
        self.queued = metrics.queued("text")
        self.batcher: Batcher[PackedInput, Rows] = Batcher(
            "text",
            partial(_launch, engine),
            cost=engine.cost,
            budget=config.max_batch_cost,
            max_queued=config.max_queue_cost,
            max_wait=config.max_queue_seconds,
            depth=engine.depth,
            events=metrics.events("text", died=died, attributes=_attributes),
        )
        metrics.watch_batcher(self.batcher, lambda: self.in_flight)

    def handle(self, request: wire.Request) -> Awaitable[wire.Reply]:
        """Return the reply to come, of an ``EmbedRequest`` as a future: no task is made for it."""
        if isinstance(request, wire.EmbedRequest):
            return RequestInFlight(self, request).reply
        return self._describe(request)

    async def _describe(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Describe):
            share, images = self._shares.of(request.caller), self.images
            return msgspec.structs.replace(
                self._info,
                tokens=share.of(self.batcher.capacity, least=self._batch_cost),
                units=0 if images is None else share.of(images.units, least=images.max_units),
            )
        if isinstance(request, wire.Inspect):
            return self._metrics.state()
        raise ProtocolError(f"an embed worker does not answer {type(request).__name__}")

    def count(self, outcome: str, inputs: int) -> None:
        self._metrics.items.labels("embed", outcome).inc(inputs)

    @property
    def window(self) -> int:
        """The size that one request may have waiting: it shares the queue, however large it is."""
        return max(self._batch_cost, self.batcher.limit // 4)

    def running_seconds(self) -> float:
        """How long an engine has been busy with one batch."""
        seconds = self.batcher.running_seconds
        return seconds if self.images is None else max(seconds, self.images.running_seconds)

    async def drain(self, timeout: float) -> None:
        """Return at once: peers read nothing of this worker's memory."""

    async def close(self) -> None:
        await self.batcher.close()
        self.aside.close()
        if self.max_sim is not None:
            self.max_sim.close()
        if self.images is not None:
            await self.images.close()


class RequestInFlight:
    """One request: begins its inputs as there is room, and replies once each of them is settled.

    The batcher calls back and a timer keeps the deadline: a task for each request, with futures that it
    waits for, took 0.04 to 0.1 ms more for a lone text. An input that waits for its images, or for its score,
    is a task that is settled in the same place. Cancelling ``reply`` ends the request.

    A request is refused as a whole or not at all: once its first input is in the queue the others wait for
    room, for as long as the request has time. Of one that does not fit as a whole at most the service's
    ``window`` is unfinished at a time.
    """

    def __init__(self, service: EmbedService, request: wire.EmbedRequest) -> None:
        self.reply: Promise[wire.Reply] = Promise(loop=service.loop)
        self._service = service
        self._request = request
        self._context = copy_context()
        self._parts: list[Rows | TesseraError | None] = [None] * len(request.items)
        self._cached = [0] * len(request.items)
        self._timings: wire.Timings | None = None
        self._running: dict[int, Entry[PackedInput, Rows] | asyncio.Task[Embedded]] = {}
        self._size = self._next = 0
        self._admitted = False
        self._timer: asyncio.TimerHandle | None = None
        self._images: RequestImages | None = None
        self._deadline = time.monotonic() + request.timeout_ms / 1e3
        self._tokens = tokens = sum([item.token_count for item in request.items])
        service.in_flight += tokens
        self.reply.when_cancelled = self._cancelled
        self._outputs: tuple[Output, ...] = (service.model.output,)
        self._queries: list[npt.NDArray[np.float32]] = []
        try:
            if request.queries or request.outputs:
                self._outputs, self._queries = service.items.outputs(request), service.items.queries(request)
            # A lone input asks for room when it is queued.
            self._fits = (
                len(request.items) > 1
                and tokens <= service.window
                and service.batcher.admits(tokens, request.client)
            )
            self._go_on()
        except Exception as error:
            self._fail(error)
        if not self.reply.done():
            self._timer = service.loop.call_later(request.timeout_ms / 1e3, self._expire)

    def _go_on(self) -> None:
        """Begin inputs in their order for as long as there is room; reply when none is left."""
        items = self._request.items
        while self._next < len(items):
            item = items[self._next]
            if not self._fits and self._running and self._size + item.token_count > self._service.window:
                return
            try:
                self._begin(self._next, item)
            except Overloaded:
                if not self._admitted:
                    raise
                if not self._running:
                    self._service.loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            self._next += 1
        if not self._running:
            if self._request.into is not None:
                return self._answer_aside(self._request.into)
            reply = self._answer()
            self._end()
            self.reply.set_result(reply)

    def _answer_aside(self, into: wire.SlabInfo) -> None:
        service = self._service
        landed = service.aside.run(partial(self._landed, into), self._request.client)
        running = asyncio.ensure_future(landed)
        running.add_done_callback(self._ended_aside)

    def _landed(self, into: wire.SlabInfo) -> wire.EmbedReply:
        """Return the reply, the rows of a lone output in the caller's memory; on a thread.

        To look at 13 MB of rows, and to write them, takes 6 ms.
        """
        reply = self._answer()
        if len(reply.outputs) != 1:
            return reply
        try:
            land(into, reply.outputs[0].rows)
        except TransportUnavailable as error:
            log.warning("rows go into the reply: %s", error)
            return reply
        sent = msgspec.structs.replace(reply.outputs[0], rows=_NO_BYTES)
        return msgspec.structs.replace(reply, outputs=(sent,))

    def _ended_aside(self, running: asyncio.Future[wire.EmbedReply]) -> None:
        error = running.exception()
        if self.reply.done():
            return
        if error is not None:
            self._fail(error)
        else:
            self._end()
            self.reply.set_result(running.result())

    def _begin(self, index: int, item: wire.Item) -> None:
        """Queue an input, or begin a task for it; raises ``Overloaded`` and what else befalls the request."""
        service, request = self._service, self._request
        try:
            packed = service.items.read(item, request.outputs)
        except TesseraError as error:
            self._parts[index] = error.kept()
            return
        if item.images or self._queries:
            work = self._with_images(index, item, packed)
        else:
            work = self._put(index, packed, admitted=self._fits)
        self._running[index] = work
        self._admitted = True
        self._size += item.token_count

    def _put(
        self, index: int, packed: PackedInput, *, cached: int = 0, admitted: bool = True
    ) -> Entry[PackedInput, Rows]:
        return self._service.batcher.put(
            packed,
            len(packed.tokens),
            partial(self._ran, index, cached),
            client=self._request.client,
            priority=self._request.priority,
            admitted=admitted,
        )

    def _with_images(
        self, index: int, item: wire.Item, packed: PackedInput
    ) -> Entry[PackedInput, Rows] | asyncio.Task[Embedded]:
        """Begin an input with images, or that is scored: queued at once if all that it needs is at hand."""
        service, request = self._service, self._request
        if self._images is None and service.images is not None:
            self._images = RequestImages(service.images, request, self._deadline)
        images = self._images
        if request.outputs == (VISION,) or (item.images and service.images_give_output):
            work = self._vision(item)
        else:
            # Asked before the images cost anything, and not again when their rows are there.
            if not self._fits:
                service.batcher.check(len(packed.tokens), request.client)
            if not self._queries and images and (encoded := images.at_hand(item.images)) is not None:
                rows = tuple([image.rows for image in encoded])
                return self._put(index, replace(packed, vision=rows), cached=sum(map(len, rows)))
            work = self._embed(item, packed)
        task = service.loop.create_task(work)
        task.add_done_callback(partial(self._ended, index))
        return task

    def _ran(self, index: int, cached: int, outcome: Outcome[Rows] | TesseraError) -> None:
        if isinstance(outcome, TesseraError):
            self._settle(index, outcome)
        else:
            timings = wire.Timings(queue_ms=outcome.queue_ms, embed_ms=outcome.run_ms)
            self._settle(index, outcome.value, cached, timings)

    def _ended(self, index: int, task: asyncio.Task[Embedded]) -> None:
        # Not in the task, which does not run at all when it is cancelled before its first step.
        if task.cancelled():
            self.reply.cancel()
        # asyncio complains of an error that is not retrieved.
        elif (error := task.exception()) is None:
            if index in self._running:
                self._settle(index, *task.result())
        elif not self.reply.done():
            if isinstance(error, TesseraError):
                self._settle(index, error)
            else:
                self._fail(error)

    def _settle(
        self, index: int, part: Rows | TesseraError, cached: int = 0, timings: wire.Timings | None = None
    ) -> None:
        """Take note of what became of an input, and go on with the request."""
        del self._running[index]
        self._size -= self._request.items[index].token_count
        self._parts[index] = part
        self._cached[index] = cached
        if timings is not None:
            self._timings = timings if self._timings is None else self._timings.merge(timings)
        if not self._running or self._next < len(self._parts):
            self._resume()

    def _resume(self) -> None:
        if self.reply.done():
            return
        try:
            # Inputs are begun for the span and the log line of the request.
            self._context.run(self._go_on)
        except Exception as error:
            # The batch that calls here is of others, too.
            self._fail(error)

    def _answer(self) -> wire.EmbedReply:
        """Return the reply. An input whose rows are faulty has failed: here is the one look at them."""
        service = self._service
        answered = [part for part in self._parts if isinstance(part, Rows)]
        rows = Rows.joined(answered) if answered else None
        for output, own in zip(self._outputs, () if rows is None else rows.each(), strict=False):
            if (faulty := own.faulty(unit_length=output.unit_length)) is not None:
                before = np.concatenate(([0], np.cumsum(faulty)))[own.bounds]
                self._drop((np.diff(before) > 0).tolist(), output)
                return self._answer()
        timings = self._timings or wire.Timings()
        service.answered(len(answered))
        service.queued(timings.queue_ms / 1e3)
        return wire.EmbedReply(
            outputs=tuple(map(_output_rows, () if rows is None else rows.each())),
            counts=tuple([len(part.values) if isinstance(part, Rows) else 0 for part in self._parts]),
            failures={} if len(answered) == len(self._parts) else self._failures(),
            cached_tokens=tuple(self._cached),
            timings=timings,
        )

    def _failures(self) -> dict[int, wire.Failure]:
        failures: dict[int, wire.Failure] = {}
        for index, part in enumerate(self._parts):
            if isinstance(part, TesseraError):
                if isinstance(part, EngineFailed) and part.param is None:
                    # An engine knows no names.
                    part = part.named(self._request.items[index].param)
                failures[index] = wire.Failure.of(part)
                self._service.count(part.code, 1)
        return failures

    def _drop(self, faulty: Sequence[bool], output: Output) -> None:
        """Put an error in place of the rows of each answered input that is ``faulty``."""
        answered = [index for index, part in enumerate(self._parts) if isinstance(part, Rows)]
        for index, is_faulty in zip(answered, faulty, strict=True):
            if is_faulty:
                self._parts[index], self._cached[index] = _fault(output), 0

    def _cancelled(self) -> None:
        self._end()
        self._service.count("cancelled", len(self._parts))

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the request was not answered in time"))

    def _fail(self, error: BaseException) -> None:
        self._end()
        if isinstance(error, Overloaded | DeadlineExceeded):
            self._service.count(error.code, len(self._parts))
        self.reply.set_exception(error)

    def _end(self) -> None:
        """Cancel what is not settled; the request's tokens count no more."""
        # Each would keep the other until the collector comes.
        self.reply.when_cancelled = None
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            self._cancel_running()
        if self._images is not None:
            self._images.close()
        self._service.in_flight -= self._tokens

    def _cancel_running(self) -> None:
        running, self._running = self._running, {}
        for work in running.values():
            if isinstance(work, Entry):
                self._service.batcher.cancel(work)
            else:
                work.cancel()

    async def _embed(self, item: wire.Item, packed: PackedInput) -> Embedded:
        """Embed an item that waits for its images' rows before its turn, or for its score after it."""
        cached, timings = 0, wire.Timings()
        if self._images is not None:
            vision, cached, timings = await self._images.all(item.images)
            packed = replace(packed, vision=vision)
        outcome = await self._service.batcher.submit(
            packed,
            len(packed.tokens),
            client=self._request.client,
            priority=self._request.priority,
            admitted=True,
        )
        timings = timings.merge(wire.Timings(queue_ms=outcome.queue_ms, embed_ms=outcome.run_ms))
        rows = await self._score(item, outcome.value) if self._queries else outcome.value
        return rows, cached, timings

    async def _score(self, item: wire.Item, rows: Rows) -> Rows:
        """Compare an item's vectors with those of its query; the score, as its only row."""
        output, max_sim = self._service.model.output, self._service.max_sim
        assert max_sim is not None
        if rows.faulty(unit_length=output.unit_length) is not None:
            raise _fault(output)
        held = rows.held().values
        # A client's own token ids may be such that no row is left.
        query, client = self._queries[item.query], self._request.client
        score = await max_sim.score(query, held, client) if len(held) else 0.0
        return Rows(np.full((1, 1), score, np.float32), np.arange(2), np.ones(1, np.float32))

    async def _vision(self, item: wire.Item) -> Embedded:
        """Return the rows of an item's images, for a client that asks for no more, or as the output."""
        assert self._images is not None
        vision, cached, timings = await self._images.all(item.images)
        if self._service.images_give_output and not any(rows.is_cuda for rows in vision):
            # A row is converted sooner than a thread begins.
            values = _host_rows(vision)
        else:
            values = await asyncio.to_thread(_host_rows, vision)
        bounds = np.array((0, len(values)))
        return scaled(values, bounds, self._outputs[0]), cached, timings


def _host_rows(images: Sequence[torch.Tensor]) -> npt.NDArray[np.float32]:
    """Return ``[rows, row_width]`` of several images."""
    # Each operation of torch gives up the interpreter's lock, also one that has nothing to do.
    found = [
        image if image.is_cpu and image.dtype == torch.float32 else image.to("cpu", torch.float32)
        for image in images
    ]
    rows: npt.NDArray[np.float32] = (found[0] if len(found) == 1 else torch.cat(found)).numpy()
    return rows


def _launch(engine: TextEngine, inputs: Sequence[PackedInput]) -> Launched[Values[Rows]]:
    """Launch a batch, whatever outputs its inputs ask for: one pass gives them all."""
    batch = pack(inputs)
    return engine.launch_named(batch) if batch.asked else engine.launch(batch)


def _attributes(inputs: Sequence[PackedInput]) -> tracing.Attributes:
    return {
        "tessera.batch.tokens": sum(len(entry.tokens) for entry in inputs),
        "tessera.batch.rows": sum(len(rows) for entry in inputs for rows in entry.vision),
    }


def _output_rows(rows: Rows) -> wire.OutputRows:
    return wire.OutputRows(
        rows=_bytes(rows.values),
        norms=_bytes(rows.norms),
        width=rows.width,
        indices=_NO_BYTES if rows.indices is None else _bytes(rows.indices),
    )


def _bytes(values: npt.NDArray[np.float32] | npt.NDArray[np.int32]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).data.cast("B") if values.size else _NO_BYTES


def _fault(output: Output) -> EngineFailed:
    """Return the error of an input with faulty rows."""
    length = " or not of length 1" if output.unit_length else ""
    return EngineFailed(f"the engine gave values that are not finite{length}")
