"""Rows of long replies that a worker writes to the frontend's memory, over the real request plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import cast

import msgspec
import numpy as np
import pytest

from tessera import wire
from tessera.engine.batch import TextBatch
from tessera.engine.settings import EngineSettings
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.serving.dispatch import Answer, Call, Dispatcher, Router
from tessera.launched import Launched
from tessera.models import Model
from tessera.models.base import Output, OutputKind, Outputs
from tessera.rows import Rows
from tessera.rpc import Client, Peers
from tessera.tasks import Deadline
from tessera.transport.host import host_id
from tessera.transport.lending import Lender
from tessera.worker.embed import EmbedService
from tessera.worker.metrics import WorkerMetrics
from tests.rpc.conftest import INFO, Deployment
from tests.waiting import until
from tests.worker.test_embed import Variant
from tests.worker.test_soundness import DamagedText

OUTPUT = Output(kind=OutputKind.TOKENS, width=4096)
TABLE = np.random.default_rng(1).standard_normal((100, OUTPUT.width)).astype(np.float32)
TABLE /= np.linalg.norm(TABLE, axis=1, keepdims=True)
TABLE[13] = np.nan
# 80 rows, 1.3 MB.
LONG = wire.Item(tokens=np.arange(14, 94, dtype="<i4").tobytes(), param="input[0]")
SHORT = wire.Item(tokens=np.arange(3, dtype="<i4").tobytes(), param="input[1]")
BAD = wire.Item(tokens=np.arange(12, 14, dtype="<i4").tobytes(), param="input[2]")


def rows_of(*items: wire.Item) -> np.ndarray:
    return TABLE[np.concatenate([np.frombuffer(item.tokens, "<i4") for item in items])]


class Vectors(DamagedText):
    """A token's row is the one of its id."""

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        rows = TABLE[batch.input_ids]
        return Launched.of(Rows(rows, batch.cu_seqlens.astype(np.int64), np.ones(len(rows), np.float32)))


class Pair:
    """A worker on ``host`` and a frontend that calls it; ``replies`` are what the worker answered."""

    def __init__(self, model: Model, host: str) -> None:
        variant = cast(Model, Variant(model, output=OUTPUT))
        self.info = msgspec.structs.replace(INFO, host=host)
        settings = EngineSettings(max_batch_cost=256, max_queue_cost=10_000)
        engine = Vectors(OUTPUT, state_width=OUTPUT.width)
        self.service = EmbedService(variant, engine, settings, None, WorkerMetrics(), self.info)
        self.replies: list[wire.EmbedReply] = []
        self.change: Callable[[wire.EmbedRequest], wire.EmbedRequest] = lambda request: request

    async def handle(self, request: wire.Request) -> wire.Reply:
        if not isinstance(request, wire.EmbedRequest):
            return self.info
        reply = await self.service.handle(self.change(request))
        assert isinstance(reply, wire.EmbedReply)
        self.replies.append(reply)
        return reply

    async def start(self, deployment: Deployment) -> None:
        await deployment.serve(self.handle)
        client = await Client.connect(deployment.runtime(), deployment.address)
        self.peers = Peers(client, lambda _: None)
        metrics, lender = FrontendMetrics().of("m"), Lender("frontend-1", capacity=4 << 20)
        self.dispatcher = Dispatcher(self.peers, Router(), metrics, Outputs([OUTPUT]), lender=lender)
        await until(lambda: len(self.peers.ready) == 1)

    async def embed(self, *items: wire.Item) -> Answer:
        return await self.dispatcher.embed(items, Call(request_id="r", deadline=Deadline.after(60)))

    @property
    def sent(self) -> int:
        """Bytes of rows in the last reply."""
        return len(self.replies[-1].outputs[0].rows)


@pytest.fixture(params=["here", "elsewhere"])
async def pair(request: pytest.FixtureRequest, deployment: Deployment, model: Model) -> AsyncIterator[Pair]:
    made = Pair(model, host_id() if request.param == "here" else "elsewhere")
    await made.start(deployment)
    yield made
    await made.peers.close()
    await made.service.close()


here = pytest.mark.parametrize("pair", ["here"], indirect=True)


async def test_rows_are_the_same_either_way(pair: Pair) -> None:
    answers = [await pair.embed(LONG, SHORT) for _ in range(2)]
    for answer in answers:
        assert np.array_equal(answer.rows.values, rows_of(LONG, SHORT))
    placed = pair.info.host == host_id()
    assert pair.sent == (0 if placed else rows_of(LONG, SHORT).nbytes)


@here
async def test_short_rows_come_in_the_reply(pair: Pair) -> None:
    answer = await pair.embed(SHORT)
    assert np.array_equal(answer.rows.values, rows_of(SHORT)) and pair.sent == rows_of(SHORT).nbytes


async def test_an_input_with_a_bad_row_fails_alone(pair: Pair) -> None:
    answer = await pair.embed(LONG, BAD, SHORT)
    assert answer.errors.keys() == {1} and answer.errors[1].param == BAD.param
    kept = np.concatenate([answer.rows.of(index).values for index in (0, 2)])
    assert np.array_equal(kept, rows_of(LONG, SHORT))


@here
async def test_more_than_there_is_memory_for_comes_in_the_reply(pair: Pair) -> None:
    kept = [await pair.embed(LONG) for _ in range(4)]
    assert [len(reply.outputs[0].rows) == 0 for reply in pair.replies] == [True, True, False, False]
    for answer in kept:
        assert np.array_equal(answer.rows.values, rows_of(LONG))


@here
async def test_rows_that_cannot_be_written_come_in_the_reply(pair: Pair) -> None:
    gone = Lender("other", capacity=4 << 20).landing(rows_of(LONG).nbytes)
    assert gone is not None
    gone.close()
    pair.change = lambda request: msgspec.structs.replace(request, into=request.into and gone.info)
    for _ in range(2):
        assert np.array_equal((await pair.embed(LONG)).rows.values, rows_of(LONG))
        assert pair.sent == rows_of(LONG).nbytes
