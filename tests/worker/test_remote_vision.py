"""Vision rows from real encode services over the real runtime, with faults of each kind."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import torch

from tessera import wire
from tessera.errors import LeaseExpired, Overloaded, TransportUnavailable, Unavailable, UnsupportedMedia
from tessera.models import Model
from tessera.rpc import Client, Server
from tessera.transport.inbox import Inbox
from tessera.transport.settings import TransportSettings
from tessera.worker import remote_vision
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.remote_vision import RemoteVision
from tests.rpc.conftest import Deployment
from tests.waiting import until
from tests.worker.conftest import Encoder, make_outbox, make_stage, picture, worker_info

Fault = Callable[[wire.EncodeRequest], Awaitable[wire.Reply | None]]


def request(timeout: float) -> tuple[wire.EmbedRequest, float]:
    """A request, and its deadline."""
    message = wire.EmbedRequest(request_id="r", items=(), timeout_ms=int(timeout * 1e3))
    return message, time.monotonic() + timeout


class Cluster:
    """Encode workers of one deployment, and one reader."""

    def __init__(self, deployment: Deployment, model: Model, transport: str) -> None:
        self._deployment, self._model, self._transport = deployment, model, transport
        self.encoders: dict[int, Encoder] = {}
        self.calls: list[int] = []
        self.inbox = Inbox("reader", TransportSettings(kind=transport))
        self.metrics = WorkerMetrics()
        self._vision: RemoteVision | None = None

    async def add(self, fault: Fault | None = None, rounding: str = "") -> int:
        """Start an encode worker; ``fault`` sees each request first and may answer in its place."""
        encoder = Encoder.make(self._model, transport=self._transport)
        runtime = self._deployment.runtime()
        # The producer's name is the instance's, as in a real worker.
        name = f"{runtime.endpoint(self._deployment.address).connection_id():x}"
        encoder.outbox.close()
        encoder.outbox = make_outbox(self._model, transport=self._transport, producer=name)
        encoder.stage = make_stage(self._model, encoder.engine, WorkerMetrics())
        info = worker_info(self._model, "encode", encoder.outbox.infos())
        info = msgspec.structs.replace(info, rounding=rounding)
        encoder.service = type(encoder.service)(encoder.stage, encoder.outbox, encoder.metrics, info)
        instance = int(name, 16)

        async def handle(request: wire.Request) -> wire.Reply:
            if isinstance(request, wire.EncodeRequest):
                self.calls.append(instance)
                if fault is not None and (reply := await fault(request)) is not None:
                    return reply
            return await encoder.service.handle(request)

        server = Server(runtime, self._deployment.address, handle)
        await server.start()
        self.encoders[instance] = encoder
        return instance

    async def vision(self) -> RemoteVision:
        if self._vision is None:
            client = await Client.connect(self._deployment.runtime(), self._deployment.address)
            self._vision = RemoteVision(
                client,
                lambda info: None,
                self.inbox,
                self.metrics,
                device=torch.device("cpu"),
                wait_seconds=5.0,
                stop=asyncio.Event(),
            )
            await until(lambda: len(self._vision._peers.ready) == len(self.encoders))  # type: ignore[union-attr]
        return self._vision

    async def rows(self, seed: int, timeout: float = 20.0) -> float:
        """The value that all of the image's rows have."""
        encoded = await (await self.vision()).encode(picture(seed), *request(timeout))
        assert bool((encoded.rows == encoded.rows[0, 0]).all())
        return float(encoded.rows[0, 0])

    def outcome(self, name: str) -> float:
        return self.metrics.registry.get_sample_value("tessera_encode_calls_total", {"outcome": name}) or 0.0

    async def close(self) -> None:
        if self._vision is not None:
            await self._vision.close()
        for encoder in self.encoders.values():
            await until(functools.partial(_empty, encoder))
            await encoder.close()


def _empty(encoder: Encoder) -> bool:
    stats = encoder.outbox.slab.stats()
    return stats.held == stats.leased == stats.used_bytes == 0


@pytest.fixture(params=["shm,inline"])
async def cluster(
    deployment: Deployment, model: Model, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """Afterwards every slot has been given back."""
    made = Cluster(deployment, model, request.param)
    yield made
    await made.close()


async def test_rows_arrive_by_shared_memory_and_are_given_back(cluster: Cluster) -> None:
    await cluster.add()
    assert [await cluster.rows(seed) for seed in (3, 4)] == [3.0, 4.0]
    assert cluster.outcome("ok") == 2
    assert set(cluster.inbox.routes().values()) == {"shm"}


async def test_readers_with_nothing_in_flight_do_not_all_ask_the_same_worker(cluster: Cluster) -> None:
    both = {await cluster.add(), await cluster.add()}
    for seed in range(1, 33):
        assert await cluster.rows(seed) == float(seed)
    assert set(cluster.calls) == both


async def test_rows_carry_their_engines_rounding(cluster: Cluster) -> None:
    async def full(_: wire.EncodeRequest) -> wire.Reply | None:
        raise Unavailable("closing")

    await cluster.add(full)
    await cluster.add(rounding="fp8")
    vision = await cluster.vision()
    assert list(vision.roundings) == ["", "fp8"]
    assert {(await vision.encode(picture(seed), *request(20))).rounding for seed in range(3)} == {"fp8"}


async def test_a_worker_that_is_gone_costs_a_call_to_another(cluster: Cluster) -> None:
    async def gone(_: wire.EncodeRequest) -> wire.Reply | None:
        raise Unavailable("closing")

    good, bad = await cluster.add(), await cluster.add(gone)
    assert [await cluster.rows(seed) for seed in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert cluster.calls.count(good) == 6
    assert cluster.outcome("unavailable") == cluster.calls.count(bad)


async def test_with_every_worker_gone_the_caller_is_told(cluster: Cluster) -> None:
    async def gone(_: wire.EncodeRequest) -> wire.Reply | None:
        raise Unavailable("closing")

    for _ in range(2):
        await cluster.add(gone)
    with pytest.raises(Unavailable):
        await cluster.rows(1)
    assert len(cluster.calls) == 3, "two retries, not more"


async def test_a_full_worker_is_not_asked_again(cluster: Cluster) -> None:
    async def full(_: wire.EncodeRequest) -> wire.Reply | None:
        raise Overloaded("full", retry_after=3.0)

    await cluster.add(full)
    with pytest.raises(Overloaded) as caught:
        await cluster.rows(1)
    assert caught.value.retry_after == 3.0
    assert len(cluster.calls) == 1


async def test_a_bad_image_is_not_tried_elsewhere(cluster: Cluster) -> None:
    async def bad(_: wire.EncodeRequest) -> wire.Reply | None:
        raise UnsupportedMedia("no image", param="input[0]")

    for _ in range(2):
        await cluster.add(bad)
    with pytest.raises(UnsupportedMedia):
        await cluster.rows(1)
    assert len(cluster.calls) == 1


async def test_a_lease_that_ran_out_is_asked_for_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.add()
    fetch, failures = cluster.inbox.fetch, 0

    async def late(handle: wire.Handle, into: torch.device) -> torch.Tensor:
        nonlocal failures
        if failures < 2:
            failures += 1
            cluster.inbox.discard(handle)
            raise LeaseExpired("too late")
        return await fetch(handle, into)

    monkeypatch.setattr(cluster.inbox, "fetch", late)
    assert await cluster.rows(5) == 5.0
    assert cluster.outcome("hand_off") == 2 and len(cluster.calls) == 3


async def test_a_kind_that_fails_is_replaced_by_the_next(cluster: Cluster) -> None:
    """The reader cannot map the slab any more: the rows come in the reply instead."""
    instance = await cluster.add()
    await cluster.vision()
    (slab,) = cluster.inbox._slabs.values()

    async def broken(handle: wire.Handle, into: object) -> torch.Tensor:
        raise TransportUnavailable("the mapping is gone")

    slab.fetch = broken  # type: ignore[method-assign]
    assert await cluster.rows(6) == 6.0
    assert cluster.inbox.routes() == {f"{instance:x}": "inline"}


async def test_a_failed_hand_off_prefers_another_worker(cluster: Cluster) -> None:
    async def unreachable(_: wire.EncodeRequest) -> wire.Reply | None:
        raise TransportUnavailable("no way to this reader")

    good, bad = await cluster.add(), await cluster.add(unreachable)
    assert [await cluster.rows(seed) for seed in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert cluster.calls.count(good) == 4
    assert cluster.calls.count(bad) == cluster.outcome("hand_off")


async def test_hand_offs_that_never_work_end_in_an_error(cluster: Cluster) -> None:
    async def unreachable(_: wire.EncodeRequest) -> wire.Reply | None:
        raise TransportUnavailable("no way to this reader")

    await cluster.add(unreachable)
    with pytest.raises(Unavailable, match="could not be fetched"):
        await cluster.rows(1)
    assert len(cluster.calls) <= 6


@pytest.mark.parametrize("stopped", [False, True])
async def test_no_encode_worker_is_said_plainly(
    deployment: Deployment, model: Model, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_vision, "DRAIN_PATIENCE_SECONDS", 0.1)
    cluster = Cluster(deployment, model, "inline")
    stop = asyncio.Event()
    vision = RemoteVision(
        await Client.connect(deployment.runtime(), deployment.address),
        lambda _: None,
        cluster.inbox,
        cluster.metrics,
        device=torch.device("cpu"),
        wait_seconds=600 if stopped else 0.1,
        stop=stop,
    )
    waiting = asyncio.ensure_future(vision.encode(picture(1), *request(600)))
    await asyncio.sleep(0)
    if stopped:
        stop.set()
    with pytest.raises(Unavailable, match="no encode worker"):
        await asyncio.wait_for(waiting, 60)
    await vision.close()


async def test_a_cancelled_encode_stops_the_work_there(cluster: Cluster) -> None:
    instance = await cluster.add()
    encoder = cluster.encoders[instance]
    vision = await cluster.vision()
    encoder.engine.gate.clear()
    first = asyncio.ensure_future(vision.encode(picture(1), *request(20)))
    await asyncio.to_thread(encoder.engine.entered.acquire)
    second = asyncio.ensure_future(vision.encode(picture(2), *request(20)))
    await until(lambda: encoder.stage._admitted.used == 2)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await until(lambda: encoder.stage._admitted.used == 1)
    encoder.engine.gate.set()
    await first
    assert encoder.engine.images == 1, "the cancelled image never reached the engine"


async def test_work_is_spread_over_the_workers(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.add()
    await cluster.vision()
    for encoder in cluster.encoders.values():
        encoder.engine.gate.clear()
    calls = [asyncio.ensure_future(cluster.rows(seed)) for seed in range(10)]
    await until(lambda: len(cluster.calls) == 10)
    for encoder in cluster.encoders.values():
        encoder.engine.gate.set()
    await asyncio.gather(*calls)
    assert sorted(cluster.calls.count(instance) for instance in cluster.encoders) == [5, 5]
