"""Vision rows from encode workers: choose one, call it, read the rows, give the lease back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec

from tessera import tracing, wire
from tessera.budgets import RetryBudget
from tessera.errors import DeadlineExceeded, HandOffError, ProtocolError, TesseraError, Unavailable
from tessera.logs import count
from tessera.rpc import DRAIN_PATIENCE_SECONDS, Check, Client, Loads, Peers
from tessera.transport.inbox import Inbox, on_device
from tessera.worker.image_rows import EncodedImage
from tessera.worker.metrics import WorkerMetrics

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# An encode worker that is gone costs one more call, and another one when its neighbour goes meanwhile. A
# hand-off that failed costs a call for each kind that turns out not to reach the peer, and one for a lease
# that ran out.
_UNAVAILABLE_RETRIES = 2
_HAND_OFF_RETRIES = 4

# At most this many cancelled calls are being forgotten at a time; the leases of the others run out.
_MOST_FORGETTING = 256
_FORGET_SECONDS = 5.0


class RemoteVision:
    """Sends each image to the encode worker with the fewest units in flight from here.

    When none is left, images wait ``wait_seconds`` for the next, and not as long once ``stop`` is set.
    """

    # Nothing is encoded in this process.
    units, running_seconds = 0, 0.0

    def __init__(
        self,
        client: Client,
        check: Check,
        inbox: Inbox,
        metrics: WorkerMetrics,
        *,
        device: torch.device,
        wait_seconds: float,
        stop: asyncio.Event,
    ) -> None:
        self._inbox = inbox
        self._into = on_device(device)
        self._metrics = metrics
        self._wait_seconds = wait_seconds
        self._units = Loads()
        self._roundings: list[str] = []
        self._budget = RetryBudget()
        self._calls = itertools.count(1)
        self._forgetting: set[asyncio.Task[None]] = set()
        # Reached before its first image comes: registering memory takes longer than an image does.
        self._peers = Peers(client, check, joined=self._connect, left=self._let_go)
        self._hurrying = asyncio.create_task(self._hurry_at(stop))

    @property
    def roundings(self) -> Sequence[str]:
        if found := sorted({info.rounding for info in self._peers.ready.values()}):
            self._roundings = found
        return self._roundings

    async def encode(self, image: wire.Image, request: wire.EmbedRequest, deadline: float) -> EncodedImage:
        self._budget.called()
        failures: list[tuple[int, str]] = []
        while True:
            instance = await self._choose([failed for failed, _ in failures], deadline)
            try:
                encoded = await self._encode_at(instance, image, request, deadline)
            except (Unavailable, HandOffError) as error:
                if not self._asks_again(instance, error, failures):
                    _give_up(error, image)
            except TesseraError as error:
                self._metrics.encode_calls.labels(error.code).inc()
                raise
            else:
                self._metrics.encode_calls.labels("ok").inc()
                return encoded

    async def close(self) -> None:
        tasks = [self._hurrying, *self._forgetting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._peers.close()
        self._inbox.close()

    async def _hurry_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._peers.hurry(DRAIN_PATIENCE_SECONDS)

    async def _choose(self, tried: Collection[int], deadline: float) -> int:
        ready = self._peers.ready
        # A worker that was restarted a moment ago is worth a short wait, a deployment without any is not.
        if not ready and not await self._peers.wait_back(self._wait_seconds, deadline - time.monotonic()):
            raise Unavailable("no encode worker is available, so images cannot be embedded", retry_after=1.0)
        return self._units.least(ready.keys() - tried or ready.keys())

    def _asks_again(self, instance: int, error: TesseraError, failures: list[tuple[int, str]]) -> bool:
        """Add a failed call to an image's ``failures``; whether another is to be made."""
        outcome, most = "hand_off", _HAND_OFF_RETRIES
        if isinstance(error, Unavailable):
            outcome, most = "unavailable", _UNAVAILABLE_RETRIES
            self._peers.suspect(instance)
        self._metrics.encode_calls.labels(outcome).inc()
        failures.append((instance, outcome))
        if sum(other == outcome for _, other in failures) > most:
            return False
        if not self._budget.take():
            self._metrics.encode_calls.labels("no_retry").inc()
            return False
        self._metrics.encode_retries.inc()
        count("encode_retries")
        log.debug("encode worker %x: %s; asking again", instance, error)
        return True

    async def _encode_at(
        self, instance: int, image: wire.Image, request: wire.EmbedRequest, deadline: float
    ) -> EncodedImage:
        left = deadline - time.monotonic()
        message = wire.EncodeRequest(
            request_id=request.request_id,
            image=image,
            timeout_ms=max(1, int(left * 1e3)),
            reader=self._inbox.reader_info(f"{instance:x}"),
            priority=request.priority,
            client=request.client,
            call=f"{self._inbox.reader}-{next(self._calls)}",
        )
        rounding = self._peers.ready[instance].rounding
        self._units.add(instance, image.units)
        try:
            reply = await self._peers.call(instance, message, timeout=left)
        except (asyncio.CancelledError, DeadlineExceeded, Unavailable):
            # The answer may be on its way, with a lease that would be held until it runs out.
            self._forget(instance, message.call)
            raise
        finally:
            self._units.add(instance, -image.units)
        if not isinstance(reply, wire.EncodeReply):
            raise ProtocolError(f"encode worker {instance:x} answered {type(reply).__name__}")
        rows, timings = await self._fetch(reply, deadline)
        return EncodedImage(rows, timings, rounding=rounding)

    def _forget(self, instance: int, call: str) -> None:
        if len(self._forgetting) < _MOST_FORGETTING:
            task = asyncio.create_task(self._send_forget(instance, call))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _send_forget(self, instance: int, call: str) -> None:
        with suppress(TesseraError):
            await self._peers.client.call(instance, wire.Forget(call=call), timeout=_FORGET_SECONDS)

    async def _fetch(self, reply: wire.EncodeReply, deadline: float) -> tuple[torch.Tensor, wire.Timings]:
        handle = reply.handle
        started = time.perf_counter()
        try:
            with tracing.span("transfer", {"tessera.transfer.route": handle.kind}) as span:
                async with asyncio.timeout(deadline - time.monotonic()):
                    rows = await self._inbox.fetch(handle, self._into)
                span.set_attribute("tessera.transfer.bytes", rows.nbytes)
        except TimeoutError as error:
            raise DeadlineExceeded("the vision rows did not arrive in time") from error
        except HandOffError as error:
            self._metrics.transfers.labels(handle.kind, error.code).inc()
            raise
        elapsed = time.perf_counter() - started
        self._metrics.transfers.labels(handle.kind, "ok").inc()
        self._metrics.transfer_bytes.labels(handle.kind).inc(rows.nbytes)
        self._metrics.transfer_seconds.labels(handle.kind).observe(elapsed)
        return rows, msgspec.structs.replace(reply.timings, transfer_ms=elapsed * 1e3)

    def _connect(self, instance: int, info: wire.WorkerInfo) -> None:
        self._inbox.connect(f"{instance:x}", info.slabs)

    def _let_go(self, instance: int) -> None:
        """Let go of the slab of a worker that is gone: a restarted one comes back under a new name."""
        self._inbox.forget(f"{instance:x}")


def _give_up(error: Unavailable | HandOffError, image: wire.Image) -> NoReturn:
    if isinstance(error, Unavailable):
        raise error
    raise Unavailable(f"the vision rows could not be fetched: {error}", param=image.param) from error
