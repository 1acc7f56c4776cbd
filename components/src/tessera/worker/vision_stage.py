"""From image bytes to vision rows in memory that the caller gives: decode, preprocess, batch, encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch

from tessera import tracing, wire
from tessera.batching import Batcher
from tessera.budgets import Budget
from tessera.engine.base import VisionEngine
from tessera.engine.batch import pack_images
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import EngineDead, InvalidInput, UnsupportedMedia
from tessera.image_plan import ImagePlan
from tessera.launched import Launched
from tessera.models.base import Int32Array, Model, Pixels, VisionSpec
from tessera.turns import Threads
from tessera.worker.decoding import Decoder
from tessera.worker.image_rows import EncodedImage
from tessera.worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessed:
    """An image as the engine takes it: its pixels with ``Model.unit_positions``, and the time that took."""

    pixels: Pixels
    positions: Int32Array
    milliseconds: float


@dataclass(frozen=True, slots=True)
class _Work:
    image: Preprocessed
    out: torch.Tensor | None


class VisionStage:
    """Owns the preprocessing threads, their decoder and the vision engine's queue."""

    def __init__(
        self,
        model: Model,
        vision: VisionSpec,
        engine: VisionEngine,
        settings: EngineSettings,
        placement: Placement,
        metrics: WorkerMetrics,
        *,
        decoder: Decoder,
        threads: int,
        died: Callable[[EngineDead], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._vision = vision
        self._metrics = metrics
        self._queued = metrics.queued("vision")
        self._decoder = decoder
        self._takes_floats = engine.takes_floats
        # A quarter of six would leave a key that is alone 400 pictures a second of 1,300.
        self._threads = Threads(threads, "preprocess", spare=1)

        def launch(work: Sequence[_Work]) -> Launched[list[torch.Tensor]]:
            images = [entry.image for entry in work]
            batch = pack_images([image.pixels for image in images], [image.positions for image in images])
            sizes = [entry.image.pixels.plan.rows for entry in work if entry.out is None]
            host = placement.host_rows(sum(sizes), vision.row_width) if sizes else None

            def out(host: torch.Tensor | None) -> list[torch.Tensor]:
                own = iter(() if host is None else torch.split(host, sizes))
                return [next(own) if entry.out is None else entry.out for entry in work]

            # A copy, once for all: rows that are waited for keep no page-locked memory.
            return engine.launch(batch, out(host)).map(lambda _: out(None if host is None else host.clone()))

        self._batcher: Batcher[_Work, torch.Tensor] = Batcher(
            "vision",
            launch,
            cost=engine.cost,
            budget=settings.max_batch_cost,
            max_queued=settings.max_queue_cost,
            max_wait=settings.max_queue_seconds,
            depth=engine.depth,
            events=metrics.events("vision", died=died, attributes=self._attributes),
        )
        self._admitted = Budget(
            lambda: self._batcher.limit,
            "the vision stage",
            retry_after=lambda: self._batcher.seconds_to_drain(self._admitted.used),
        )
        metrics.watch_batcher(self._batcher, lambda: self._admitted.used)

    @property
    def capacity(self) -> int:
        """Units that may be here at a time, in the engine included."""
        return self._admitted.limit

    @property
    def max_units(self) -> int:
        """Units of the largest image."""
        return self._vision.max_units

    @property
    def running_seconds(self) -> float:
        """How long the engine has been busy with one batch."""
        return self._batcher.running_seconds

    @contextmanager
    def admit(self, image: wire.Image, client: str = "") -> Iterator[None]:
        """Hold a place for the image's units; raises ``Overloaded`` when the queue's limit would be passed.

        The engine's queue alone is no bound: images wait for a preprocessing thread and for a place for
        their rows before they come to it. Raises ``InvalidInput`` for a plan that no image has, and
        ``UnsupportedMedia`` for normalised pixels where the engine takes none.
        """
        if image.pixels and not self._takes_floats:
            raise _no_pixels(image.param)
        if not self._vision.allows(image.plan):
            most = _in_words(self._vision.largest)
            raise InvalidInput(
                f"no image has {_in_words(image.plan)}, the largest has {most}", param=image.param
            )
        self._admitted.hold(client, image.units)
        try:
            yield
        finally:
            self._admitted.give(client, image.units)

    async def preprocess(
        self, image: wire.Image, request: wire.EmbedRequest | wire.EncodeRequest
    ) -> Preprocessed:
        """Decode the image off the event loop, in the turn of the client that sent ``request``.

        Whoever is cancelled before that turn has nothing decoded.

        Raises ``InvalidInput`` when it became something else than its plan, and what ``Decoder`` raises.
        """
        started = time.perf_counter()
        attributes = {"tessera.image.bytes": len(image.data), "tessera.units": image.units}
        with tracing.span("preprocess", attributes):
            pixels, positions = await self._threads.run(
                partial(self._decoded, image), request.client, priority=request.priority
            )
        elapsed = (time.perf_counter() - started) * 1e3
        self._metrics.preprocess_seconds.observe(elapsed / 1e3)
        return Preprocessed(pixels=pixels, positions=positions, milliseconds=elapsed)

    async def encode(
        self,
        image: Preprocessed,
        out: torch.Tensor | None,
        request: wire.EmbedRequest | wire.EncodeRequest,
        on_cancelled: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, wire.Timings]:
        """Write the rows of an image, which ``admit`` has let in, into ``out`` ``[rows, row_width]``.

        Returns ``out``. Without it the rows come as float32 in host memory, with those of the whole batch in
        one wait for the device. ``request`` is what they are for. When this is cancelled, ``out`` still
        belongs to the engine until ``on_cancelled`` is called.
        """
        future = self._batcher.submit(
            _Work(image, out),
            image.pixels.plan.units,
            client=request.client,
            priority=request.priority,
            admitted=True,
            on_cancelled=on_cancelled,
        )
        try:
            outcome = await future
        except asyncio.CancelledError:
            if not future.cancelled():
                # The engine finished in the same turn of the loop as the cancellation came: the batcher
                # has delivered, and knows nothing of it.
                future.exception()
                on_cancelled()
            raise
        self._queued(outcome.queue_ms / 1e3)
        return outcome.value, wire.Timings(
            queue_ms=outcome.queue_ms, preprocess_ms=image.milliseconds, encode_ms=outcome.run_ms
        )

    async def close(self) -> None:
        await self._batcher.close()
        self._threads.close()
        # Behind what is being decoded now, which cannot be called off.
        await asyncio.to_thread(self._decoder.close)

    def _attributes(self, work: Sequence[_Work]) -> tracing.Attributes:
        plans = [entry.image.pixels.plan for entry in work]
        return {
            "tessera.batch.units": sum(plan.units for plan in plans),
            "tessera.batch.rows": sum(plan.rows for plan in plans),
        }

    def _decoded(self, image: wire.Image) -> tuple[Pixels, Int32Array]:
        if image.pixels:
            pixels = self._normalised(image)
        else:
            pixels = self._decoder.decode(image.data, param=image.param)
        if pixels.plan != image.plan:
            made, planned = _in_words(pixels.plan), _in_words(image.plan)
            raise InvalidInput(
                f"the image became {made}, but its prompt was built for {planned}", param=image.param
            )
        return pixels, self._model.unit_positions(pixels.plan)

    def _normalised(self, image: wire.Image) -> Pixels:
        """A client's own pixels, as float32, which holds every float16."""
        dtype, shape = np.dtype(image.pixels), (image.units, *self._vision.unit_shape)
        if len(image.data) != prod(shape) * dtype.itemsize or not self._vision.independent_units:
            raise InvalidInput(
                f"{len(image.data)} bytes are no {image.pixels} pixels {list(shape)}", param=image.param
            )
        # A copy: torch warns of memory that it might not write to.
        values = np.frombuffer(image.data, dtype.newbyteorder("<")).reshape(shape).astype(np.float32)
        return Pixels(values=values, plan=ImagePlan(units=image.units, rows=self._vision.rows(image.units)))


def _no_pixels(param: str) -> UnsupportedMedia:
    return UnsupportedMedia(
        f"{param}: the vision engine of this service was compiled for image files alone;"
        " pixels that a client normalised need engine: torch",
        param=param,
    )


def _in_words(plan: ImagePlan) -> str:
    grid = "" if plan.grid is None else f" of a grid {plan.grid}"
    return f"{plan.units} units and {plan.rows} rows{grid}"


class LocalVision:
    """A ``VisionSource`` in this process: rows for a text engine stay where the vision engine wrote them.

    Rows that are the output come to the host. One after the other they would each wait for the device, behind
    the next batch.
    """

    def __init__(
        self, stage: VisionStage, vision: VisionSpec, placement: Placement, rounding: str = ""
    ) -> None:
        self._stage = stage
        self._vision = vision
        self._placement = placement
        self.roundings = (rounding,)

    @property
    def units(self) -> int:
        return self._stage.capacity

    @property
    def running_seconds(self) -> float:
        return self._stage.running_seconds

    async def encode(self, image: wire.Image, request: wire.EmbedRequest, deadline: float) -> EncodedImage:
        # Without a timer: that of the request ends it, unless another one waits for the same image.
        with self._stage.admit(image, request.client):
            preprocessed = await self._stage.preprocess(image, request)
            vision, out = self._vision, None
            if not vision.gives_output:
                out = self._placement.rows(image.rows, vision.row_width)
            rows, timings = await self._stage.encode(preprocessed, out, request)
        return EncodedImage(rows, timings, rounding=self.roundings[0])

    async def close(self) -> None:
        await self._stage.close()
