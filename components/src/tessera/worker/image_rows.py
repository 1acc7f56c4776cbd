"""The vision rows of images: from the cache, from a flight under way, or from a ``VisionSource``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import torch
from blake3 import blake3
from opentelemetry.trace import Span

from tessera import tracing, wire
from tessera.cache import EmbeddingCache, SingleFlight
from tessera.engine.streams import HostCopies
from tessera.errors import DeadlineExceeded, EngineFailed, InvalidInput, MediaNotCached, TesseraError
from tessera.models.base import Model
from tessera.worker.precomputed import PrecomputedRows
from tessera.worker.vision_source import EncodedImage, VisionSource


class CacheFill:
    """Rows in host memory go in at once, rows on a device when their copy has arrived.

    Until then the same image may be encoded once more, which costs time and changes no vector.
    """

    def __init__(self, cache: EmbeddingCache) -> None:
        self._cache = cache
        self._copies = HostCopies()
        self._arriving: set[asyncio.Task[None]] = set()

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        if not rows.is_cuda:
            self._cache.put(key, rows)
            return
        task = asyncio.create_task(self._arrive(key, rows))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def close(self) -> None:
        """Wait for the copies under way."""
        await asyncio.gather(*self._arriving, return_exceptions=True)
        self._copies.close()

    async def _arrive(self, key: bytes, rows: torch.Tensor) -> None:
        self._cache.put(key, await self._copies.copy(rows))


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its deadline by the monotonic clock."""

    request: wire.EmbedRequest
    deadline: float


class ImageRows:
    """Rows ``[tokens, hidden]`` of images; the same image is encoded once however many ask for it.

    ``vision`` is None where only text is served; ``dtype`` is that of the rows.
    """

    def __init__(
        self,
        model: Model,
        cache: EmbeddingCache,
        vision: VisionSource | None,
        precomputed: PrecomputedRows,
        dtype: str,
    ) -> None:
        self._model = model
        self._cache = cache
        self._fill = CacheFill(cache)
        self._vision = vision
        self._precomputed = precomputed
        self._flights: SingleFlight[EncodedImage] = SingleFlight()
        self._dtype = dtype
        self._salts: dict[str, bytes] = {}

    @property
    def tiles(self) -> int:
        """How many tiles the vision stage may have at a time; 0 without one."""
        return self._vision.tiles if self._vision is not None else 0

    @property
    def running_seconds(self) -> float:
        """How long an engine of this process has been busy with one batch of tiles."""
        return self._vision.running_seconds if self._vision is not None else 0.0

    async def close(self) -> None:
        await self._fill.close()
        if self._vision is not None:
            await self._vision.close()

    def count(self, image: wire.Image | wire.Embeddings) -> int:
        """How many rows the image has."""
        if isinstance(image, wire.Embeddings):
            return image.handle.shape[0]
        return image.tiles * self._model.tokens_per_tile

    async def get(self, job: Job, image: wire.Image | wire.Embeddings) -> tuple[EncodedImage, bool]:
        """One image's rows, and whether they came from the cache.

        Raises ``InvalidInput`` where no images are served, ``MediaNotCached`` for an image that was named
        without its bytes, and what the vision stage raises, with this request's name for the image.
        """
        with tracing.span("vision rows", {"tessera.input": image.param}) as span:
            return await self._look_up(job, image, span)

    async def _look_up(
        self, job: Job, image: wire.Image | wire.Embeddings, span: Span
    ) -> tuple[EncodedImage, bool]:
        if isinstance(image, wire.Embeddings):
            span.set_attributes({"tessera.cache": "precomputed", "tessera.transfer.route": image.handle.kind})
            return EncodedImage(await self._precomputed.fetch(image), wire.Timings()), False
        if self._vision is None:
            raise InvalidInput("this deployment serves text only", param=image.param)
        # What an engine gave that rounds as none of them does now is not what a miss would give.
        cached = self._cache.get(*(self._key(image, rounding) for rounding in self._vision.roundings))
        found = "miss" if cached is None else "hit"
        span.set_attributes({"tessera.cache": found, "tessera.tiles": image.tiles})
        if cached is not None:
            return self._checked(EncodedImage(cached, wire.Timings()), image), True
        if not image.data:
            raise MediaNotCached(
                f"{image.param}: the image is not cached any more; send it again", param=image.param
            )
        try:
            encoded = await self._fly(job, image)
        except TesseraError as error:
            if error.param is None:
                raise
            # The flight may have been another request's, whose name for the image says nothing here.
            raise type(error)(error.message, param=image.param, retry_after=error.retry_after) from error
        if encoded.span is not None and encoded.span is not tracing.here():
            # Another request's flight, or another input's of this one.
            span.set_attribute("tessera.cache", "joined")
            span.add_link(encoded.span.get_span_context())
        return self._checked(encoded, image), False

    async def _fly(self, job: Job, image: wire.Image) -> EncodedImage:
        try:
            return await self._flights.run(image.digest, lambda: self._encode(job, image))
        except DeadlineExceeded:
            # A flight has the time of whoever began it; one who joined late may have more. Our own
            # deadline would have cancelled us.
            return await self._flights.run(image.digest, lambda: self._encode(job, image))

    async def _encode(self, job: Job, image: wire.Image) -> EncodedImage:
        assert self._vision is not None
        encoded = await self._vision.encode(
            image,
            request_id=job.request.request_id,
            timeout=job.deadline - time.monotonic(),
            client=job.request.client,
            priority=job.request.priority,
        )
        self._checked(encoded, image)
        self._fill.put(self._key(image, encoded.rounding), encoded.rows)
        return replace(encoded, span=tracing.here())

    def _key(self, image: wire.Image, rounding: str) -> bytes:
        """The digest names the image, what follows it everything else that its rows depend on."""
        if rounding not in self._salts:
            named = "\0".join((self._model.fingerprint, self._dtype, rounding))
            self._salts[rounding] = blake3(named.encode()).digest(16)
        return image.digest + self._salts[rounding]

    def _checked(self, encoded: EncodedImage, image: wire.Image) -> EncodedImage:
        expected = (image.tiles * self._model.tokens_per_tile, self._model.hidden)
        if tuple(encoded.rows.shape) != expected:
            raise EngineFailed(
                f"the vision stage gave rows {tuple(encoded.rows.shape)}, not {expected}", param=image.param
            )
        return encoded
