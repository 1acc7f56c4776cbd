"""The encode role: one image in, a handle to its vision rows out."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from tessera import tracing, wire
from tessera.cache import BoundedLru
from tessera.errors import DeadlineExceeded, ProtocolError, RequestCancelled, TesseraError
from tessera.transport.outbox import Outbox
from tessera.worker.embed import EmbedService
from tessera.worker.frontend_shares import FrontendShares
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.vision_stage import VisionStage

log = logging.getLogger(__name__)

# Calls that are remembered: an older one's lease has run out or been read by now.
_MOST_CALLS: Final = 4096

# The share of a request's time that it may wait for a slot.
_SLOT_SHARE: Final = 0.8


class EncodeService:
    """Answers ``EncodeRequest``, ``Forget``, ``Describe`` and ``Inspect``; knows no tokens and no HTTP.

    ``vectors`` answers ``EmbedRequest`` by images, in a family whose vectors of images are their rows. It
    closes the stage.
    """

    def __init__(
        self,
        stage: VisionStage,
        outbox: Outbox,
        metrics: WorkerMetrics,
        info: wire.WorkerInfo,
        *,
        vectors: EmbedService | None = None,
    ) -> None:
        self._stage = stage
        self._vectors = vectors
        self._outbox = outbox
        self._metrics = metrics
        self._info = info
        # Looked up once: it is used for every image.
        self._answered = metrics.items.labels("encode", "ok").inc
        # By the readers' names of their calls; 0, which is no lease, for one that was forgotten before it had
        # any, and then is not to get one.
        self._leases: BoundedLru[str, int] = BoundedLru(_MOST_CALLS)
        self._shares = FrontendShares()

    async def handle(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.EmbedRequest) and self._vectors is not None:
            return await self._vectors.handle(request)
        if not isinstance(request, wire.EncodeRequest):
            return self._answer(request)
        try:
            async with asyncio.timeout(request.timeout_ms / 1e3):
                with self._stage.admit(request.image, request.client):
                    reply = await self._encode(request)
        except BaseException as error:
            self._count_failure(error)
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineExceeded("the image was not encoded in time", param=request.image.param) from error
        self._answered()
        return reply

    def _answer(self, request: wire.Request) -> wire.Reply:
        """Reply to what asks for no rows."""
        if isinstance(request, wire.Describe):
            share = self._shares.of(request.caller)
            return msgspec.structs.replace(
                self._info, units=share.of(self._stage.capacity, least=self._stage.max_units)
            )
        if isinstance(request, wire.Inspect):
            return self._metrics.state()
        if isinstance(request, wire.Forget):
            if lease := self._leases.pop(request.call):
                self._outbox.slab.release(lease)
            elif request.call:
                self._leases.put(request.call, 0)
            return wire.Forgotten()
        raise ProtocolError(f"an encode worker does not answer {type(request).__name__}")

    def _count_failure(self, error: BaseException) -> None:
        if isinstance(error, TimeoutError):
            error = DeadlineExceeded("")
        if isinstance(error, TesseraError | asyncio.CancelledError):
            outcome = error.code if isinstance(error, TesseraError) else "cancelled"
            self._metrics.items.labels("encode", outcome).inc()

    async def _encode(self, request: wire.EncodeRequest) -> wire.EncodeReply:
        image = await self._stage.preprocess(request.image, request)
        # Shorter than the request's own time, so that a full slab is reported as such.
        wait = _SLOT_SHARE * request.timeout_ms / 1e3
        with tracing.span("slab"):
            slot = await self._outbox.slab.acquire(request.image.rows, timeout=wait)
        timings = None
        try:
            _, timings = await self._stage.encode(image, slot.rows, request, slot.free)
            if self._leases.pop(request.call) == 0:
                raise RequestCancelled("the reader has gone")
            with tracing.span("publish") as span:
                handle = await self._outbox.publish(slot, request.reader)
                span.set_attribute("tessera.transfer.route", handle.kind)
        except BaseException as error:
            # Into the slot of a call that is cancelled the engine may be writing: it is freed when the engine
            # is done with it.
            if timings is not None or not isinstance(error, asyncio.CancelledError):
                slot.free()
            raise
        if request.call:
            self._leases.put(request.call, handle.lease)
        return wire.EncodeReply(handle=handle, timings=timings)

    async def drain(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for readers that are still copying."""
        if not await self._outbox.slab.drain(timeout=timeout):
            log.warning("leases were still held after %.0f s", timeout)

    def running_seconds(self) -> float:
        return self._stage.running_seconds

    async def close(self) -> None:
        await (self._stage if self._vectors is None else self._vectors).close()
        self._outbox.close()
