"""From image bytes to vision rows in memory that the caller gives: decode, tile, batch, encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

import torch

from tessera import tracing, wire
from tessera.batching import Batcher, Events, Outcome
from tessera.engine.base import VisionEngine
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import DeadlineExceeded, EngineDead, InvalidInput, Overloaded
from tessera.fair_share import Budget
from tessera.launched import Launched
from tessera.models.base import Model, UInt8Array
from tessera.worker.decoding import Decoder
from tessera.worker.image_rows import EncodedImage, Job
from tessera.worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class _Work:
    tiles: UInt8Array
    out: torch.Tensor


class VisionStage:
    """Owns the preprocessing threads, their decoder and the vision engine's queue."""

    def __init__(
        self,
        model: Model,
        engine: VisionEngine,
        settings: EngineSettings,
        metrics: WorkerMetrics,
        *,
        decoder: Decoder,
        threads: int,
        died: Callable[[EngineDead], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._decoder = decoder
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="preprocess")

        def launch(work: Sequence[_Work]) -> Launched[list[None]]:
            # The rows are in each entry's ``out`` then; there is nothing else to give back.
            written = engine.launch([entry.tiles for entry in work], [entry.out for entry in work])
            return written.map(lambda _: [None] * len(work))

        self._batcher: Batcher[_Work, None] = Batcher(
            "vision",
            launch,
            cost=engine.cost,
            budget=settings.max_batch_cost,
            max_queued=settings.max_queue_cost,
            max_wait=settings.max_queue_seconds,
            depth=engine.depth,
            events=Events(
                ran=metrics.batch("vision"),
                cancelled=metrics.cancelled("vision"),
                died=died,
                attributes=self._attributes,
            ),
        )
        self._admitted = Budget(lambda: self._batcher.limit)
        metrics.watch_queue(
            "vision", lambda: float(self._batcher.queued), limit=lambda: float(self._batcher.limit)
        )
        metrics.watch_in_flight("vision", lambda: float(self._admitted.used))

    @property
    def capacity(self) -> int:
        """Tiles that may be here at a time, in the engine included."""
        return self._admitted.limit

    @property
    def max_tiles(self) -> int:
        """Tiles of the largest image."""
        return self._model.max_tiles

    @property
    def running_seconds(self) -> float:
        """How long the engine has been busy with one batch."""
        return self._batcher.running_seconds

    def rows(self, tiles: UInt8Array) -> int:
        return len(tiles) * self._model.tokens_per_tile

    @contextmanager
    def admit(self, image: wire.Image, client: str = "") -> Iterator[None]:
        """Hold a place for the image's tiles; raises ``Overloaded`` when the queue's limit would be passed.

        The engine's queue alone is no bound: images wait for a preprocessing thread and for a place for
        their rows before they come to it.
        """
        if not self._admitted.admits(client, image.tiles):
            raise Overloaded(
                f"the vision stage is full ({self._admitted.used} of {self._admitted.limit} tiles)",
                retry_after=self._batcher.seconds_to_drain(self._admitted.used),
            )
        self._admitted.take(client, image.tiles)
        try:
            yield
        finally:
            self._admitted.give(client, image.tiles)

    async def preprocess(self, image: wire.Image) -> tuple[UInt8Array, float]:
        """uint8 ``[tiles, 3, height, width]`` and the milliseconds it took, off the event loop."""
        started = time.perf_counter()
        # What is logged there is about this request, too.
        decode = partial(copy_context().run, self._decode, image)
        attributes = {"tessera.image.bytes": len(image.data), "tessera.tiles": image.tiles}
        with tracing.span("preprocess", attributes):
            tiles = await asyncio.get_running_loop().run_in_executor(self._threads, decode)
        elapsed = (time.perf_counter() - started) * 1e3
        self._metrics.preprocessed(elapsed)
        return tiles, elapsed

    async def encode(
        self,
        tiles: UInt8Array,
        out: torch.Tensor,
        *,
        client: str = "",
        priority: int = 0,
        on_cancelled: Callable[[], None] = lambda: None,
    ) -> Outcome[None]:
        """Write the tiles' rows, which ``admit`` has let in, into ``out``.

        When this is cancelled, ``out`` still belongs to the engine until ``on_cancelled`` is called.
        """
        future = self._batcher.submit(
            _Work(tiles, out),
            len(tiles),
            client=client,
            priority=priority,
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
        self._metrics.queued("vision", outcome.queue_ms)
        return outcome

    async def close(self) -> None:
        await self._batcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        # Behind what is being decoded now, which cannot be called off.
        await asyncio.to_thread(self._decoder.close)

    def _attributes(self, work: Sequence[_Work]) -> tracing.Attributes:
        tiles = sum(len(entry.tiles) for entry in work)
        return {"tessera.batch.tiles": tiles, "tessera.batch.rows": tiles * self._model.tokens_per_tile}

    def _decode(self, image: wire.Image) -> UInt8Array:
        tiles = self._decoder.tiles(image.data, param=image.param)
        if len(tiles) != image.tiles:
            raise InvalidInput(
                f"the image became {len(tiles)} tiles, but its prompt was built for {image.tiles}",
                param=image.param,
            )
        return tiles


class LocalVision:
    """A ``VisionSource`` in this process: the rows stay where the vision engine wrote them."""

    def __init__(self, stage: VisionStage, hidden: int, placement: Placement, rounding: str = "") -> None:
        self._stage = stage
        self._hidden = hidden
        self._placement = placement
        self.roundings = (rounding,)

    @property
    def tiles(self) -> int:
        return self._stage.capacity

    @property
    def running_seconds(self) -> float:
        return self._stage.running_seconds

    async def encode(self, image: wire.Image, job: Job) -> EncodedImage:
        try:
            async with asyncio.timeout(job.deadline - time.monotonic()):
                with self._stage.admit(image, job.client):
                    tiles, preprocess_ms = await self._stage.preprocess(image)
                    out = torch.empty(
                        self._stage.rows(tiles),
                        self._hidden,
                        dtype=self._placement.torch_dtype,
                        device=self._placement.device,
                    )
                    outcome = await self._stage.encode(tiles, out, client=job.client, priority=job.priority)
        except TimeoutError as error:
            raise DeadlineExceeded("the image was not encoded in time", param=image.param) from error
        return EncodedImage(
            out,
            wire.Timings(queue_ms=outcome.queue_ms, preprocess_ms=preprocess_ms, encode_ms=outcome.run_ms),
            rounding=self.roundings[0],
        )

    async def close(self) -> None:
        await self._stage.close()
