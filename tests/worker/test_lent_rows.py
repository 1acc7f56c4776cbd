"""Which way a client's own rows go to a worker, with workers that answer over the real request plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

from tessera import wire
from tessera.errors import TransportUnavailable
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.serving.dispatch import Answer, Call, Dispatcher, Router
from tessera.models.base import Output, OutputKind, Outputs
from tessera.rpc import Client, Peers
from tessera.tasks import Deadline
from tessera.transport.host import host_id
from tessera.transport.lending import Lender, inline_handle
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.precomputed import PrecomputedRows
from tests.rpc.conftest import INFO, Deployment
from tests.waiting import until

WIDTH = INFO.row_width
OUTPUT = Output(kind=OutputKind.VECTOR, width=WIDTH)


def item(value: float, rows: int = 3) -> wire.Item:
    data = np.full((rows, WIDTH), value, np.float32).tobytes()
    made = inline_handle(data, shape=(rows, WIDTH), dtype="float32")
    payload = wire.Embeddings(digest=blake3(data).digest(), handle=made, param="input[0]")
    return wire.Item(tokens=b"\0" * 4 * rows, images=(payload,), param="input[0]")


class Reading:
    """A worker that answers with the first value of the rows it was sent, and a frontend that calls it."""

    def __init__(self, deployment: Deployment, host: str) -> None:
        self._deployment = deployment
        self.info = msgspec.structs.replace(INFO, host=host)
        self.metrics = WorkerMetrics()
        self.rows = PrecomputedRows("w", row_width=WIDTH, dtype="float32", metrics=self.metrics)
        self.kinds: list[str] = []
        self.refuse: set[str] = set()
        self.lender = Lender("frontend-1", capacity=1000)
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, request: wire.Request) -> wire.Reply:
        if not isinstance(request, wire.EmbedRequest):
            return self.info
        values = []
        failures = {}
        for index, entry in enumerate(request.items):
            (payload,) = entry.images
            assert isinstance(payload, wire.Embeddings)
            self.kinds.append(payload.handle.kind)
            await self.gate.wait()
            if payload.handle.kind in self.refuse:
                failures[index] = wire.Failure.of(TransportUnavailable("no such memory"))
            rows: torch.Tensor = await self.rows.fetch(payload)
            if index not in failures:
                values.append(rows[-1].numpy())
        return wire.EmbedReply(
            outputs=(
                wire.OutputRows(
                    rows=b"".join(value.tobytes() for value in values),
                    norms=bytes(4 * len(values)),
                    width=WIDTH,
                ),
            ),
            counts=tuple(int(index not in failures) for index in range(len(request.items))),
            failures=failures,
            cached_tokens=(0,) * len(request.items),
            timings=wire.Timings(),
        )

    async def start(self) -> None:
        await self._deployment.serve(self.handle)
        client = await Client.connect(self._deployment.runtime(), self._deployment.address)
        self.peers = Peers(client, lambda _: None)
        self.dispatcher = Dispatcher(
            self.peers, Router(), FrontendMetrics().of("m"), Outputs([OUTPUT]), lender=self.lender
        )
        await until(lambda: len(self.peers.ready) == 1)

    async def embed(self, *items: wire.Item, timeout: float = 20.0) -> Answer:
        return await self.dispatcher.embed(items, Call(request_id="r", deadline=Deadline.after(timeout)))


@pytest.fixture
async def here(deployment: Deployment) -> AsyncIterator[Reading]:
    made = Reading(deployment, host_id())
    await made.start()
    yield made
    assert made.lender.lent == 0
    await made.peers.close()


async def test_by_memory_on_one_host(here: Reading) -> None:
    got = await here.embed(item(1.5), item(2.5))
    assert got.rows.values[:, 0].tolist() == [1.5, 2.5]
    assert here.kinds == ["shm", "shm"]
    assert 'tessera_transfers_total{outcome="ok",route="shm"} 2.0' in here.metrics.render()


async def test_in_the_message_to_another_host(deployment: Deployment) -> None:
    there = Reading(deployment, "another")
    await there.start()
    got = await there.embed(item(1.5))
    assert (got.rows.values[0, 0], there.kinds) == (1.5, ["inline"])
    await there.peers.close()


async def test_in_the_message_when_too_much_is_lent(here: Reading) -> None:
    got = await here.embed(item(1, rows=40), item(2, rows=40))
    assert got.rows.values[:, 0].tolist() == [1, 2]
    assert here.kinds == ["shm", "inline"]


async def test_in_the_message_after_memory_could_not_be_read(here: Reading) -> None:
    here.refuse = {"shm"}
    got = await here.embed(item(7))
    assert (got.errors, got.rows.values[0, 0]) == ({}, 7)
    await here.embed(item(8))
    assert here.kinds == ["shm", "inline", "inline"]


async def test_nothing_stays_lent_when_the_client_goes_away(here: Reading) -> None:
    here.gate.clear()
    task = asyncio.ensure_future(here.embed(item(1)))
    await until(lambda: here.lender.lent > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert here.lender.lent == 0
    here.gate.set()
