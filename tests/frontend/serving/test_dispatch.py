"""Items to workers and back, over the real runtime: order, spread, retries, what fails and what does not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from tessera import wire
from tessera.budgets import RetryBudget
from tessera.errors import DeadlineExceeded, EngineDead, InvalidInput, Overloaded, ProtocolError, Unavailable
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.serving.dispatch import Answer, Call, Dispatcher, Router
from tessera.models.base import Output, OutputKind, Outputs
from tessera.rpc import Client, Peers
from tessera.tasks import Deadline
from tessera.transport.lending import inline_handle
from tests.rpc.conftest import INFO, Deployment, deployment, store
from tests.waiting import until

__all__ = ["deployment", "store"]

WIDTH = INFO.width
OUTPUT = Output(kind=OutputKind.VECTOR, width=WIDTH)
Handler = Callable[[wire.EmbedRequest], Awaitable[wire.Reply]]


def text(number: int, size: int = 1) -> wire.Item:
    """An item whose rows are its number."""
    return wire.Item(tokens=np.full(size, number, "<i4").tobytes(), param=f"input[{number}]")


def image(number: int, nbytes: int = 10) -> wire.Item:
    data = number.to_bytes(4, "little") + bytes(nbytes)
    made = wire.Image(digest=blake3(data).digest(), data=data, units=1, rows=256, param="p")
    return wire.Item(tokens=np.full(256, number, "<i4").tobytes(), images=(made,), param=f"input[{number}]")


def rows_of(rows: bytes, norms: bytes, width: int = WIDTH) -> wire.OutputRows:
    return wire.OutputRows(rows=rows, norms=norms, width=width)


def answer(request: wire.EmbedRequest, output: Output = OUTPUT) -> wire.EmbedReply:
    first = [int(np.frombuffer(item.tokens, "<i4")[0]) for item in request.items]
    counts = tuple(output.rows(item.token_count) for item in request.items)
    values = np.repeat(np.array(first, np.float32), counts)
    return wire.EmbedReply(
        outputs=(rows_of(np.repeat(values, output.width).tobytes(), values.tobytes(), output.width),),
        counts=counts,
        cached_tokens=tuple(first),
        timings=wire.Timings(),
    )


class Frontend:
    """A dispatcher with the workers that a test gives it."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.requests: dict[int, list[wire.EmbedRequest]] = {}
        self.metrics = FrontendMetrics()
        self.router = Router()
        self.dispatcher: Dispatcher
        self.peers: Peers

    async def worker(self, handler: Handler | None = None) -> int:
        seen: list[wire.EmbedRequest] = []

        async def handle(request: wire.Request) -> wire.Reply:
            if not isinstance(request, wire.EmbedRequest):
                return INFO
            seen.append(request)
            return answer(request) if handler is None else await handler(request)

        server = await self._deployment.serve(handle)
        self.requests[server.instance] = seen
        return server.instance

    async def start(self, wait_seconds: float = 0.2, output: Output = OUTPUT) -> None:
        client = await Client.connect(self._deployment.runtime(), self._deployment.address)
        # Large requests on a slow machine would keep it from hearing of a worker in time.
        self.peers = Peers(client, lambda _: None, check_every=60.0)
        metrics = self.metrics.of("m")
        self.dispatcher = Dispatcher(
            self.peers, self.router, metrics, Outputs([output]), wait_seconds=wait_seconds
        )
        await until(lambda: len(self.peers.ready) == len(self.requests))

    async def embed(
        self, *items: wire.Item, timeout: float = 120.0, queries: tuple[bytes, ...] = ()
    ) -> Answer:
        try:
            call = Call(request_id="r", deadline=Deadline.after(timeout), queries=queries)
            return await self.dispatcher.embed(items, call)
        finally:
            # Whatever happened, nothing stays counted.
            assert not self.router.loads._loads

    def retries(self) -> float:
        return self.metrics.registry.get_sample_value("tessera_retries_total", {"model": "m"}) or 0.0


@pytest.fixture
async def frontend(deployment: Deployment) -> AsyncIterator[Frontend]:
    made = Frontend(deployment)
    yield made
    if hasattr(made, "peers"):
        await made.peers.close()


async def fails(error: Exception) -> None:
    raise error


async def test_answers_are_in_the_order_of_the_items(frontend: Frontend) -> None:
    for _ in range(3):
        await frontend.worker()
    await frontend.start()
    items = [image(number) if number % 3 else text(number) for number in range(60)]
    got = await frontend.embed(*items)
    assert got.rows.values[:, 0].tolist() == list(range(60))
    assert got.cached_tokens == list(range(60))
    assert got.errors == {}


async def test_each_item_gets_as_many_rows_as_it_has_tokens(frontend: Frontend) -> None:
    output = Output(kind=OutputKind.TOKENS, width=3)

    async def rows(request: wire.EmbedRequest) -> wire.Reply:
        reply = answer(request, output)
        values = {name: getattr(reply, name) for name in reply.__struct_fields__}
        numbers = [int(np.frombuffer(item.tokens, "<i4")[0]) for item in request.items]
        if 4 not in numbers:
            return reply
        # A failed item has no rows.
        bad = numbers.index(4)
        first, last = sum(reply.counts[:bad]), sum(reply.counts[: bad + 1])
        (given,) = reply.outputs
        return wire.EmbedReply(
            **values
            | {
                "outputs": (
                    rows_of(
                        bytes(given.rows)[: 12 * first] + bytes(given.rows)[12 * last :],
                        bytes(given.norms)[: 4 * first] + bytes(given.norms)[4 * last :],
                        3,
                    ),
                ),
                "counts": (*reply.counts[:bad], 0, *reply.counts[bad + 1 :]),
                "failures": {bad: wire.Failure.of(InvalidInput("no"))},
            }
        )

    for _ in range(3):
        await frontend.worker(rows)
    await frontend.start(output=output)
    got = await frontend.embed(*(text(number, size=1 + number % 5) for number in range(40)))
    assert list(got.errors) == [4]
    assert got.rows.bounds.tolist() == np.cumsum([0] + [1 + number % 5 for number in range(40)]).tolist()
    for number in range(40):
        of_item = got.rows.values[got.rows.bounds[number] : got.rows.bounds[number + 1]]
        assert (of_item == (0 if number == 4 else number)).all()
    assert got.rows.values[got.rows.places([9, 2]), 0].tolist() == [9] * 5 + [2] * 3
    assert (got.rows.norms == got.rows.values[:, 0]).all()


async def test_one_large_request_is_spread(frontend: Frontend) -> None:
    for _ in range(3):
        await frontend.worker()
    await frontend.start()
    await frontend.embed(*(text(number, size=100) for number in range(90)))
    assert [len(seen) for seen in frontend.requests.values()] == [1, 1, 1]
    assert [len(seen[0].items) for seen in frontend.requests.values()] == [30, 30, 30]


async def test_large_images_travel_in_several_calls(frontend: Frontend) -> None:
    instance = await frontend.worker()
    await frontend.start()
    got = await frontend.embed(*(image(number, 3 << 20) for number in range(5)), image(5, 20 << 20))
    assert got.rows.values[:, 0].tolist() == list(range(6))
    assert sorted(len(request.items) for request in frontend.requests[instance]) == [1, 1, 2, 2]


async def test_an_image_of_many_items_travels_once_with_each_call(frontend: Frontend) -> None:
    for _ in range(2):
        await frontend.worker()
    await frontend.start()
    (query,) = image(99, 20 << 20).images
    assert isinstance(query, wire.Image)
    items = []
    for number in range(30):
        item = image(number) if number % 2 else text(number)
        items.append(msgspec.structs.replace(item, images=(query, *item.images)))
    got = await frontend.embed(*items)
    assert got.errors == {} and got.rows.values[:, 0].tolist() == list(range(30))
    for (request,) in frontend.requests.values():
        sent = [entry for item in request.items for entry in item.images]
        assert [len(entry.data) for entry in sent if entry.digest == query.digest] == [
            len(query.data),
            *[0] * (len(request.items) - 1),
        ]
        assert all(entry.data for entry in sent if entry.digest != query.digest)
        assert {(entry.param, entry.rows) for entry in sent} == {("p", 256)}


async def test_rows_of_one_file_under_two_grids_travel_with_both(frontend: Frontend) -> None:
    instance = await frontend.worker()
    await frontend.start()
    items = [
        wire.Item(
            tokens=text(1).tokens,
            images=(
                wire.Embeddings(
                    digest=b"d" * 32,
                    handle=inline_handle(bytes(48), shape=(6, 2), dtype="float32"),
                    grid=grid,
                    param="p",
                ),
            ),
            param="p",
        )
        for grid in ((1, 2, 3), (1, 3, 2), (1, 2, 3))
    ]
    await frontend.embed(*items)
    (request,) = frontend.requests[instance]
    sent = [entry for item in request.items for entry in item.images]
    assert [len(entry.handle.data) for entry in sent if isinstance(entry, wire.Embeddings)] == [48, 48, 0]


async def test_queries_go_to_the_workers_whose_items_name_them(frontend: Frontend) -> None:
    async def compare(request: wire.EmbedRequest) -> wire.Reply:
        """The first number of the item's query."""
        numbers = [int(np.frombuffer(request.queries[item.query], np.float32)[0]) for item in request.items]
        assert len(set(numbers)) == len(request.queries)
        return answer(
            msgspec.structs.replace(request, items=tuple(map(text, numbers))),
            Output(kind=OutputKind.SCORE, width=1),
        )

    await frontend.worker(lambda _: fails(Unavailable("closing")))
    for _ in range(2):
        await frontend.worker(compare)
    await frontend.start(output=Output(kind=OutputKind.TOKENS, width=WIDTH))
    queries = tuple(np.full((3, WIDTH), number, np.float32).tobytes() for number in range(40))
    each = [msgspec.structs.replace(text(7, size=9), query=number) for number in range(40)]
    got = await frontend.embed(*each, queries=queries)
    assert got.errors == {} and got.rows.values.tolist() == [[number] for number in range(40)]
    one = [msgspec.structs.replace(item, query=0) for item in each]
    got = await frontend.embed(*one, queries=queries[5:6])
    assert got.errors == {} and got.rows.values.tolist() == [[5]] * 40


async def test_large_outputs_come_in_several_replies(frontend: Frontend) -> None:
    output = Output(kind=OutputKind.TOKENS, width=4096)

    async def rows(request: wire.EmbedRequest) -> wire.Reply:
        return answer(request, output)

    instance = await frontend.worker(rows)
    await frontend.start(output=output)
    # Rows of 16 KiB: 20 MiB for each item.
    got = await frontend.embed(*(text(number, size=1280) for number in range(5)))
    assert got.errors == {} and got.rows.values[got.rows.bounds[:-1], 0].tolist() == list(range(5))
    assert sorted(len(request.items) for request in frontend.requests[instance]) == [1, 2, 2]


async def test_a_worker_that_is_gone_costs_one_retry_elsewhere(frontend: Frontend) -> None:
    good = await frontend.worker()
    await frontend.worker(lambda _: fails(Unavailable("closing")))
    await frontend.start()
    got = await frontend.embed(*(text(number) for number in range(10)))
    assert got.errors == {} and got.rows.values[:, 0].tolist() == list(range(10))
    assert frontend.retries() == 5
    assert sum(len(request.items) for request in frontend.requests[good]) == 10


async def test_a_request_that_breaks_engines_is_sent_to_no_third_worker(frontend: Frontend) -> None:
    for _ in range(4):
        await frontend.worker(lambda _: fails(EngineDead("illegal access")))
    await frontend.start()
    got = await frontend.embed(text(0))
    assert isinstance(got.errors[0], EngineDead)
    assert sum(len(seen) for seen in frontend.requests.values()) == 2


async def test_two_workers_that_go_one_after_another_cost_two_retries(frontend: Frontend) -> None:
    for _ in range(2):
        await frontend.worker(lambda _: fails(Unavailable("closing")))
    await frontend.start()
    await frontend.worker()
    await until(lambda: len(frontend.peers.ready) == 3)
    for number in range(6):
        got = await frontend.embed(text(number))
        assert got.errors == {} and got.rows.values[0, 0] == number


async def test_requests_wait_for_a_worker_that_is_started_again(frontend: Frontend) -> None:
    await frontend.start(wait_seconds=60.0)
    waiting = asyncio.ensure_future(frontend.embed(text(7)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await frontend.worker()
    got = await waiting
    assert got.errors == {} and got.rows.values[0, 0] == 7


async def test_retries_have_a_budget(frontend: Frontend) -> None:
    for _ in range(2):
        await frontend.worker(lambda _: fails(Unavailable("closing")))
    await frontend.start()
    frontend.dispatcher._budget = RetryBudget(per_second=0.0, burst=0.0)
    got = await frontend.embed(text(0))
    assert isinstance(got.errors[0], Unavailable)
    assert sum(len(seen) for seen in frontend.requests.values()) == 1
    assert frontend.metrics.registry.get_sample_value("tessera_retries_denied_total", {"model": "m"}) == 1


async def test_an_item_without_an_encode_worker_is_tried_elsewhere_alone(frontend: Frontend) -> None:
    async def no_images(request: wire.EmbedRequest) -> wire.Reply:
        failure = wire.Failure.of(Unavailable("no encode worker"))
        reply = answer(request)
        failed = {index: failure for index, item in enumerate(request.items) if item.images}
        (given,) = reply.outputs
        rows = b"".join(
            given.rows[4 * WIDTH * index : 4 * WIDTH * (index + 1)]
            for index in range(len(request.items))
            if index not in failed
        )
        return wire.EmbedReply(
            outputs=(rows_of(rows, given.norms[: 4 * (len(request.items) - len(failed))]),),
            counts=tuple(int(index not in failed) for index in range(len(request.items))),
            failures=failed,
            cached_tokens=reply.cached_tokens,
            timings=reply.timings,
        )

    for _ in range(2):
        await frontend.worker(no_images)
    await frontend.start()
    got = await frontend.embed(text(0), image(1), text(2))
    assert list(got.errors) == [1] and isinstance(got.errors[1], Unavailable)
    assert got.rows.values[[0, 2], 0].tolist() == [0, 2]
    assert frontend.retries() == 2
    # The workers themselves are well: text went on.
    assert len(frontend.peers.ready) == 2


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after=3.0), InvalidInput("no"), DeadlineExceeded("late")]
)
async def test_what_no_other_worker_would_change_is_not_retried(frontend: Frontend, error: Exception) -> None:
    for _ in range(2):
        await frontend.worker(lambda _: fails(error))
    await frontend.start()
    got = await frontend.embed(text(0))
    assert type(got.errors[0]) is type(error)
    assert frontend.retries() == 0
    assert sum(len(seen) for seen in frontend.requests.values()) == 1


async def test_no_worker_is_said_with_when_to_come_back(frontend: Frontend) -> None:
    await frontend.start()
    with pytest.raises(Unavailable, match="no embed worker") as caught:
        await frontend.embed(text(0))
    assert caught.value.retry_after


async def test_a_deadline_ends_the_wait(frontend: Frontend) -> None:
    async def slow(request: wire.EmbedRequest) -> wire.Reply:
        assert 0 < request.timeout_ms <= 300
        await asyncio.sleep(60)
        raise AssertionError

    await frontend.worker(slow)
    await frontend.start()
    got = await frontend.embed(text(0), timeout=0.3)
    assert isinstance(got.errors[0], DeadlineExceeded)
    # Of the whole request, without the names of endpoints.
    assert re.fullmatch(r"the request took longer than [\d.]+ s", got.errors[0].message)


async def test_a_cancelled_request_is_cancelled_at_the_worker(frontend: Frontend) -> None:
    cancelled = asyncio.Event()

    async def slow(request: wire.EmbedRequest) -> wire.Reply:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError

    instance = await frontend.worker(slow)
    await frontend.start()
    call = asyncio.ensure_future(frontend.embed(text(0, size=50)))
    await until(lambda: frontend.requests[instance])
    assert frontend.router.loads[instance] == 50
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.wait_for(cancelled.wait(), 60)
    assert frontend.router.loads[instance] == 0


WRONG: dict[str, dict[str, object]] = {
    "no output": {"outputs": ()},
    "one row of two": {"outputs": (rows_of(bytes(4), bytes(4)),)},
    "no norms": {"outputs": (rows_of(bytes(4 * WIDTH), b""),)},
    "another width": {"outputs": (rows_of(bytes(4 * WIDTH), bytes(4), 2 * WIDTH),)},
    "an output too many": {"outputs": (rows_of(bytes(4 * WIDTH), bytes(4)),) * 2},
    "a count too large": {"counts": (2,)},
    "no counts": {"counts": ()},
    "no cached tokens": {"cached_tokens": ()},
    "a failure of no input": {"failures": {5: wire.Failure(code="x", message="y")}},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
async def test_a_reply_of_another_shape_is_refused(frontend: Frontend, changes: dict[str, object]) -> None:
    async def wrong(request: wire.EmbedRequest) -> wire.Reply:
        reply = answer(request)
        values = {name: getattr(reply, name) for name in reply.__struct_fields__}
        return wire.EmbedReply(**(values | changes))

    await frontend.worker(wrong)
    await frontend.start()
    got = await frontend.embed(text(0))
    assert isinstance(got.errors[0], ProtocolError)
