"""Vision rows from encode workers: choose one, call it, read the rows, give the lease back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tessera import wire
from tessera.errors import DeadlineExceeded, HandOffError, ProtocolError, TesseraError, Unavailable
from tessera.rpc import Check, Client, Peers
from tessera.transport.inbox import Inbox
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.vision_source import EncodedImage

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# An encode worker that is gone costs one more call. A hand-off that failed costs a call for each kind
# that turns out not to reach the peer, and one for a lease that ran out.
_UNAVAILABLE_RETRIES = 1
_HAND_OFF_RETRIES = 4


class RemoteVision:
    """Sends each image to the encode worker with the fewest tiles in flight from here."""

    def __init__(
        self,
        client: Client,
        check: Check,
        inbox: Inbox,
        metrics: WorkerMetrics,
        *,
        device: torch.device,
        wait_seconds: float,
    ) -> None:
        self._inbox = inbox
        self._device = device
        self._metrics = metrics
        self._wait_seconds = wait_seconds
        self._tiles: Counter[int] = Counter()
        self._connected: set[str] = set()
        # Reached before its first image comes: registering memory takes longer than an image does.
        self._peers = Peers(client, check, joined=lambda instance, info: self._connect(f"{instance:x}", info))

    async def encode(self, image: wire.Image, *, request_id: str, timeout: float) -> EncodedImage:
        deadline = time.monotonic() + timeout
        tried: set[int] = set()
        unavailable = hand_off = 0
        while True:
            instance = await self._choose(tried, deadline)
            try:
                encoded = await self._encode_at(instance, image, request_id, deadline)
            except Unavailable as error:
                self._metrics.encode_calls.labels("unavailable").inc()
                self._peers.suspect(instance)
                tried.add(instance)
                unavailable += 1
                if unavailable > _UNAVAILABLE_RETRIES:
                    raise
                self._metrics.encode_retries.inc()
                log.info("%s: encode worker %x: %s; trying another", request_id, instance, error)
            except HandOffError as error:
                self._metrics.encode_calls.labels("hand_off").inc()
                tried.add(instance)
                hand_off += 1
                if hand_off > _HAND_OFF_RETRIES:
                    raise Unavailable(
                        f"the vision rows could not be fetched: {error}", param=image.param
                    ) from error
                self._metrics.encode_retries.inc()
                log.info("%s: hand-off from %x: %s; asking again", request_id, instance, error)
            except TesseraError as error:
                self._metrics.encode_calls.labels(error.code).inc()
                raise
            else:
                self._metrics.encode_calls.labels("ok").inc()
                return encoded

    async def close(self) -> None:
        await self._peers.close()
        self._inbox.close()

    async def _choose(self, tried: set[int], deadline: float) -> int:
        # A worker that was restarted a moment ago is worth a short wait, a deployment without any is not.
        wait = min(self._wait_seconds, deadline - time.monotonic())
        if not self._peers.ready and not await self._peers.wait(wait):
            raise Unavailable("no encode worker is available, so images cannot be embedded")
        ready = self._peers.ready
        return min(
            ready.keys() - tried or ready.keys(), key=lambda instance: (self._tiles[instance], instance)
        )

    async def _encode_at(
        self, instance: int, image: wire.Image, request_id: str, deadline: float
    ) -> EncodedImage:
        info = self._peers.ready[instance]
        producer = f"{instance:x}"
        self._connect(producer, info)
        left = deadline - time.monotonic()
        request = wire.EncodeRequest(
            request_id=request_id,
            image=image,
            timeout_ms=max(1, int(left * 1e3)),
            reader=self._inbox.reader_info(producer),
        )
        self._tiles[instance] += image.tiles
        try:
            reply = await self._peers.call(instance, request, timeout=left)
        finally:
            self._tiles[instance] -= image.tiles
            if not self._tiles[instance]:
                del self._tiles[instance]
        if not isinstance(reply, wire.EncodeReply):
            raise ProtocolError(f"encode worker {instance:x} answered {type(reply).__name__}")
        return EncodedImage(*await self._fetch(reply, deadline))

    async def _fetch(self, reply: wire.EncodeReply, deadline: float) -> tuple[torch.Tensor, wire.Timings]:
        handle = reply.handle
        started = time.perf_counter()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                rows = await self._inbox.fetch(handle, self._device)
        except TimeoutError as error:
            raise DeadlineExceeded("the vision rows did not arrive in time") from error
        except HandOffError as error:
            self._metrics.transfers.labels(handle.kind, error.code).inc()
            raise
        elapsed = (time.perf_counter() - started) * 1e3
        self._metrics.transferred(handle.kind, rows.nbytes, elapsed)
        return rows, msgspec.structs.replace(reply.timings, transfer_ms=elapsed)

    def _connect(self, producer: str, info: wire.WorkerInfo) -> None:
        # Restarted workers come back under new names: what is not listed any more is let go here.
        listed = {f"{instance:x}" for instance in self._peers.client.instances()} | {producer}
        for gone in self._connected - listed:
            self._inbox.forget(gone)
        self._connected &= listed
        self._inbox.connect(producer, info.slabs)
        self._connected.add(producer)
