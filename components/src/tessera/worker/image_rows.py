"""The vision rows of images: from the cache, from a ``VisionSource``, or from the client itself."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from blake3 import blake3
from opentelemetry.trace import Span

from tessera import tracing, wire
from tessera.cache import EmbeddingCache
from tessera.engine.streams import HostCopies
from tessera.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidInput,
    MediaNotCached,
    TesseraError,
)
from tessera.models.base import Model, VisionSpec
from tessera.tasks import SingleFlight, run_all
from tessera.wire import Same
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.precomputed import PrecomputedRows

log = logging.getLogger(__name__)


class CacheFill:
    """Puts rows into the cache: from host memory at once, from a device when their copy has arrived.

    Until then the same image may be encoded once more, which costs time and changes no vector. Rows that are
    not finite are not kept: an input that has them fails, and the next one may be luckier.
    """

    def __init__(self, cache: EmbeddingCache) -> None:
        self._cache = cache
        self._copies = HostCopies()
        self._arriving: set[asyncio.Task[None]] = set()

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        if not rows.is_cuda:
            self._keep(key, rows)
            return
        task = asyncio.create_task(self._arrive(key, rows))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def close(self) -> None:
        """Wait for the copies under way."""
        await asyncio.gather(*self._arriving, return_exceptions=True)
        self._copies.close()

    async def _arrive(self, key: bytes, rows: torch.Tensor) -> None:
        try:
            host = await self._copies.copy(rows)
        except Exception as error:
            # No page-locked memory, or no device any more: the request that the rows are for has them.
            log.warning("vision rows are not kept, they could not be copied: %s", error)
            return
        self._keep(key, host)

    def _keep(self, key: bytes, rows: torch.Tensor) -> None:
        # One value that is not finite makes the sum another. Sums of bfloat16 have float32's range as they
        # are: 0.9 ms for a page of Qwen3-VL, 1,776 rows of 8,192, where torch took 28 to convert all first.
        if math.isfinite(rows.sum(dtype=torch.float32 if rows.dtype == torch.float16 else None).item()):
            # A batch's rows may be in one block, which each of them would keep.
            alone = rows.untyped_storage().nbytes() == rows.nbytes
            self._cache.put(key, rows if alone else rows.clone())
        else:
            log.warning("vision rows are not kept, they are not finite")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Rows ``[rows, row_width]`` that nothing writes to any more, and the time they took.

    ``span`` is the one that they were made in, if it is kept; ``rounding`` is the engine's. ``cached`` says
    that they came from the cache, or from an item before in the same request.
    """

    rows: torch.Tensor
    timings: wire.Timings
    span: Span | None = None
    rounding: str = ""
    cached: bool = False


class VisionSource(Protocol):
    """Encodes one image that is not in the cache."""

    @property
    def units(self) -> int:
        """Units that this process itself takes at a time; 0 when others encode for it."""
        ...

    @property
    def running_seconds(self) -> float:
        """How long an engine of this process has been busy with one batch."""
        ...

    @property
    def roundings(self) -> Sequence[str]:
        """How the engines round that an image may come to now, or came to last if there is none."""
        ...

    async def encode(self, image: wire.Image, request: wire.EmbedRequest, deadline: float) -> EncodedImage:
        """The image's rows, by ``deadline`` on the monotonic clock in seconds, for a request that has it.

        Raises ``DeadlineExceeded`` and what the engine and the hand-off raise.
        """
        ...

    async def close(self) -> None: ...


@contextmanager
def _named(image: wire.Image | wire.Embeddings) -> Iterator[None]:
    """Give an error of a flight this item's name for the image: that of another request says nothing here."""
    try:
        yield
    except TesseraError as error:
        if error.param in (None, image.param):
            raise
        raise error.named(image.param) from error


class ImageRows:
    """Rows ``[rows, row_width]`` of images; the same image is encoded once however many ask for it.

    ``spec`` is the model's; ``source`` is None where only text is served; ``dtype`` is that of the rows.
    """

    def __init__(
        self,
        model: Model,
        spec: VisionSpec,
        cache: EmbeddingCache,
        source: VisionSource | None,
        dtype: str,
        metrics: WorkerMetrics,
    ) -> None:
        self._model = model
        self._spec = spec
        self._cache = cache
        self._fill = CacheFill(cache)
        self._source = source
        self._precomputed = PrecomputedRows("embed", row_width=spec.row_width, dtype=dtype, metrics=metrics)
        self._flights: SingleFlight[EncodedImage] = SingleFlight()
        self._dtype = dtype
        self._key_ends: dict[str, bytes] = {}
        metrics.watch_cache(cache)

    @property
    def units(self) -> int:
        """How many units the vision stage of this process may have at a time; 0 without one."""
        return self._source.units if self._source is not None else 0

    @property
    def max_units(self) -> int:
        """Units of the largest image."""
        return self._spec.max_units

    @property
    def running_seconds(self) -> float:
        """How long an engine of this process has been busy with one batch of images."""
        return self._source.running_seconds if self._source is not None else 0.0

    async def close(self) -> None:
        await self._fill.close()
        if self._source is not None:
            await self._source.close()

    def holds(self, image: wire.Image | wire.Embeddings) -> bool:
        """Whether ``hit`` would find rows; counts as no lookup."""
        return isinstance(image, wire.Image) and any(key in self._cache for key in self._keys(image))

    def hit(self, image: wire.Image, span: Span) -> EncodedImage | None:
        """Return the rows that the cache has of the image; counts as one lookup."""
        cached = self._cache.get(*self._keys(image))
        span.set_attributes(
            {"tessera.cache": "miss" if cached is None else "hit", "tessera.units": image.units}
        )
        return None if cached is None else EncodedImage(cached, wire.Timings(), cached=True)

    async def get(
        self, image: wire.Image | wire.Embeddings, request: wire.EmbedRequest, deadline: float
    ) -> EncodedImage:
        """Return one image's rows for a request that has it.

        Raises ``InvalidInput`` where no images are served, ``MediaNotCached`` for an image that was named
        without its bytes, and what the vision stage raises, with this request's name for the image.
        """
        with tracing.span("vision rows", {"tessera.input": image.param}) as span:
            if isinstance(image, wire.Embeddings):
                return await self._fetched(image, span)
            if self._source is None:
                raise InvalidInput("this deployment serves text only", param=image.param)
            if (cached := self.hit(image, span)) is not None:
                return cached
            if not image.data:
                raise MediaNotCached(
                    f"{image.param}: the image is not cached any more; send it again", param=image.param
                )
            encode = partial(self._encode, image, request, deadline)
            with _named(image):
                try:
                    encoded = await self._flights.run(image.same, encode)
                except DeadlineExceeded:
                    # A flight has the deadline of the call that began it; one that joined late may have more
                    # time. Its own deadline would have cancelled it.
                    encoded = await self._flights.run(image.same, encode)
            if encoded.span is not None and encoded.span is not tracing.here():
                # Another request's flight, or another input's of this one.
                span.set_attribute("tessera.cache", "joined")
                span.add_link(encoded.span.get_span_context())
            return encoded

    async def _fetched(self, image: wire.Embeddings, span: Span) -> EncodedImage:
        """Return rows that a client computed itself."""
        span.set_attributes({"tessera.cache": "precomputed", "tessera.transfer.route": image.handle.kind})
        return EncodedImage(await self._precomputed.fetch(image), wire.Timings())

    async def _encode(self, image: wire.Image, request: wire.EmbedRequest, deadline: float) -> EncodedImage:
        """Return the rows that the source gives, in the shape of the image's plan; keep them in the cache."""
        assert self._source is not None
        encoded = await self._source.encode(image, request, deadline)
        shape, expected = tuple(encoded.rows.shape), (image.rows, self._spec.row_width)
        if shape != expected:
            raise EngineFailed(f"the vision stage gave rows {shape}, not {expected}", param=image.param)
        self._fill.put(self._key(image, encoded.rounding), encoded.rows)
        return replace(encoded, span=tracing.here())

    def _keys(self, image: wire.Image) -> list[bytes]:
        """Those that its rows may have now, none where no images are served.

        What an engine gave that rounds as none of them does now is not what a miss would give.
        """
        roundings = self._source.roundings if self._source is not None else ()
        return [self._key(image, rounding) for rounding in roundings]

    def _key(self, image: wire.Image, rounding: str) -> bytes:
        """The digest names the image, what follows it everything else that its rows depend on.

        That its plan is part of it keeps rows of one shape from a request that was built for another.
        """
        if rounding not in self._key_ends:
            named = "\0".join((self._model.fingerprint, self._dtype, rounding))
            self._key_ends[rounding] = blake3(named.encode()).digest(16)
        plan = f" {image.units} {image.rows} {image.grid}".encode()
        return image.digest + self._key_ends[rounding] + plan


class RequestImages:
    """The images of one request's items; one that several of them have came once and is made once.

    A query's image is in each of its pairs. Rows of such an image are kept until ``close``, whatever the
    cache holds. ``deadline`` is a reading of the monotonic clock in seconds.
    """

    def __init__(self, rows: ImageRows, request: wire.EmbedRequest, deadline: float) -> None:
        self._get = partial(rows.get, request=request, deadline=deadline)
        self._rows = rows
        self._first: dict[Same, wire.Image | wire.Embeddings] = {}
        self._shared: set[Same] = set()
        self._kept: dict[Same, EncodedImage] = {}
        self._tasks: dict[Same, asyncio.Task[EncodedImage]] = {}
        for item in request.items:
            for image in item.images:
                if self._first.setdefault(image.same, image) is not image:
                    self._shared.add(image.same)

    def at_hand(self, images: Sequence[wire.Image | wire.Embeddings]) -> list[EncodedImage] | None:
        """Return the rows of one item's images where the cache has all of them.

        None, and nothing counts as a lookup, where not.
        """
        for image in images:
            if image.same not in self._kept and (image.same in self._tasks or not self._rows.holds(image)):
                return None
        return [self._hit(image) for image in images]

    def _hit(self, image: wire.Image | wire.Embeddings) -> EncodedImage:
        """Return the rows of an image that are kept here, or that the cache holds."""
        with tracing.span("vision rows", {"tessera.input": image.param}) as span:
            if (kept := self._kept.get(image.same)) is not None:
                span.set_attribute("tessera.cache", "hit")
                return kept
            assert isinstance(image, wire.Image)
            cached = self._rows.hit(image, span)
            assert cached is not None
            if image.same in self._shared:
                self._kept[image.same] = cached
            return cached

    async def all(
        self, images: Sequence[wire.Image | wire.Embeddings]
    ) -> tuple[tuple[torch.Tensor, ...], int, wire.Timings]:
        """Return the rows of each of one item's images, how many of them were cached, and their timings."""
        encoded = await run_all(
            [self._joined(image) if image.same in self._shared else self._get(image) for image in images]
        )
        timings = wire.Timings()
        for image in encoded:
            timings = timings if image.cached else timings.merge(image.timings)
        rows = tuple([image.rows for image in encoded])
        return rows, sum([len(image.rows) for image in encoded if image.cached]), timings

    async def _joined(self, image: wire.Image | wire.Embeddings) -> EncodedImage:
        """As ``ImageRows.get``, for several items; rows that another one asked for first count as cached."""
        same = image.same
        task = self._tasks.get(same)
        if task is None and same not in self._kept:
            task = self._tasks[same] = asyncio.create_task(self._get(self._first[same]))
            with _named(image):
                return await asyncio.shield(task)
        with tracing.span("vision rows", {"tessera.input": image.param}) as span:
            with _named(image):
                encoded = self._kept[same] if task is None else await asyncio.shield(task)
            span.set_attribute("tessera.cache", "hit" if encoded.cached else "joined")
            if encoded.span is not None:
                span.add_link(encoded.span.get_span_context())
        return replace(encoded, cached=True)

    def close(self) -> None:
        """End what is under way: nobody waits for it any more."""
        for task in self._tasks.values():
            if not task.cancel() and not task.cancelled():
                # asyncio complains of an error that is not retrieved.
                task.exception()
