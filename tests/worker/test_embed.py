"""The embed role: what is checked, what is cached, and who fails."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.settings import EngineSettings
from tessera.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    TesseraError,
    Unavailable,
    UnsupportedMedia,
)
from tessera.models import Model
from tessera.models.base import Content, Role, Truncate
from tessera.worker.embed import EmbedService
from tessera.worker.image_rows import EncodedImage, ImageRows, Job
from tessera.worker.metrics import WorkerMetrics
from tests.rpc.conftest import until
from tests.worker.conftest import TILE_ROWS, SummingText, picture, vision_of, worker_info


class Rows:
    """A vision source that fills an image's rows with a number of its own, when the test lets it."""

    def __init__(self, model: Model) -> None:
        self._shape = (TILE_ROWS, vision_of(model).row_width)
        self.calls: list[wire.Image] = []
        self.cancelled = 0
        self.open = asyncio.Event()
        self.open.set()
        self.error: TesseraError | None = None
        self.units = 0
        self.running_seconds = 0.0
        self.orders: list[tuple[float, str, int]] = []
        self.roundings, self.next = ["fp8"], "fp8"

    async def encode(self, image: wire.Image, job: Job) -> EncodedImage:
        self.calls.append(image)
        self.orders.append((job.deadline - time.monotonic(), job.client, job.priority))
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise type(self.error)(self.error.message, param=image.param)
        return EncodedImage(torch.full(self._shape, 2.0), wire.Timings(encode_ms=5.0), rounding=self.next)

    async def close(self) -> None: ...


class Embedder:
    def __init__(self, model: Model, *, images: bool = True, queue: int = 100_000, batch: int = 4096) -> None:
        self.model, self.engine, self.rows = model, SummingText(model.output), Rows(model)
        self.cache = EmbeddingCache(1 << 24)
        self.metrics = WorkerMetrics()
        self.service = EmbedService(
            model,
            self.engine,
            EngineSettings(max_batch_cost=batch, max_queue_cost=queue),
            ImageRows(
                *(model, vision_of(model), self.cache, self.rows if images else None),
                *("float32", self.metrics),
            ),
            self.metrics,
            worker_info(model, "embed"),
        )

    def queued(self) -> float:
        return self.metrics.registry.get_sample_value("tessera_queued", {"stage": "text"}) or 0.0

    async def __call__(self, *items: wire.Item, timeout: float = 20.0) -> wire.EmbedReply:
        request = wire.EmbedRequest(request_id="r", items=items, timeout_ms=int(timeout * 1e3))
        reply = await self.service.handle(request)
        assert isinstance(reply, wire.EmbedReply)
        return reply

    def vectors(self, reply: wire.EmbedReply) -> np.ndarray:
        return np.frombuffer(reply.rows, np.float32).reshape(-1, reply.width)


MakeEmbedder = Callable[..., Embedder]


@pytest.fixture
async def make(model: Model) -> AsyncIterator[MakeEmbedder]:
    """Embedders; afterwards nothing is left in them, and asyncio has nothing to complain about."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    made: list[Embedder] = []

    def make(**options: Any) -> Embedder:
        made.append(Embedder(model, **options))
        return made[-1]

    yield make
    for embedder in made:
        embedder.engine.gate.set()
        await embedder.service.close()
        assert embedder.queued() == 0
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


def text(*tokens: int, param: str = "input[0]") -> wire.Item:
    return wire.Item(tokens=np.array(tokens, "<i4").tobytes(), param=param)


def with_images(model: Model, *images: wire.Image, param: str = "input[0]") -> wire.Item:
    content = Content(parts=(*(image.plan for image in images), "x"), role=Role.PASSAGE)
    prompt = model.prompt(content, max_tokens=model.max_tokens, truncate=Truncate.NONE, param=param)
    return wire.Item(tokens=prompt.tokens.astype("<i4").tobytes(), images=images, param=param)


async def test_rows_of_an_engine_that_rounds_as_none_does_now_are_not_taken(
    make: MakeEmbedder, model: Model
) -> None:
    """As workers go over to another precision: both serve, then the new one alone, then the old one again."""
    embedder = make()
    item, rows = with_images(model, picture(1)), embedder.rows
    for roundings, next_, calls in (
        (["fp8"], "fp8", 1),
        (["", "fp8"], "", 1),
        ([""], "", 2),
        (["", "fp8"], "", 2),
        (["fp8"], "fp8", 2),
        (["fp8, 2"], "fp8, 2", 3),
    ):
        rows.roundings, rows.next = roundings, next_
        await embedder(item)
        assert len(rows.calls) == calls, roundings
    stats = embedder.cache.stats()
    assert (stats.hits, stats.misses, stats.entries) == (3, 3, 3)


async def test_items_are_answered_in_order(make: MakeEmbedder) -> None:
    embedder = make()
    reply = await embedder(text(5), text(6, 7), text(8, 9, 10))
    assert embedder.vectors(reply)[:, :2].tolist() == [[5, 1], [6, 2], [8, 3]]
    assert reply.failures == {} and reply.cached_tokens == (0, 0, 0)


async def test_bad_tokens_fail_their_item_alone(make: MakeEmbedder, model: Model) -> None:
    embedder = make()
    reply = await embedder(
        text(5),
        wire.Item(tokens=b"", param="input[1]"),
        wire.Item(tokens=b"\1\0\0", param="input[2]"),
        text(model.vocab_size, param="input[3]"),
        text(-1, param="input[4]"),
        text(*([1] * (model.max_tokens + 1)), param="input[5]"),
        text(6),
    )
    assert sorted(reply.failures) == [1, 2, 3, 4, 5]
    assert all(failure.param == f"input[{index}]" for index, failure in reply.failures.items())
    assert all(failure.code == "invalid_input" for failure in reply.failures.values())
    assert str(model.vocab_size - 1) in reply.failures[3].message
    assert reply.counts == (1, 0, 0, 0, 0, 0, 1)
    assert embedder.vectors(reply)[:, 0].tolist() == [5, 6]
    assert np.frombuffer(reply.norms, np.float32).tolist() == [2, 2]


async def test_placeholders_that_do_not_match_the_images_name_both_numbers(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    right = with_images(model, picture(1))
    wrong = wire.Item(tokens=right.tokens, images=(picture(1), picture(2)), param="input[0]")
    reply = await embedder(wrong)
    size = TILE_ROWS
    assert f"found {size} image tokens" in reply.failures[0].message
    assert f"the 2 images need {2 * size}" in reply.failures[0].message
    assert embedder.rows.calls == []


async def test_an_image_that_is_only_named_is_cached_or_asked_for_again(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    image = picture(3, param="input[0].image")
    named = with_images(model, msgspec.structs.replace(image, data=b""))
    cold = await embedder(named)
    assert (cold.failures[0].code, cold.failures[0].param) == ("media_not_cached", "input[0].image")
    sent, warm = await embedder(with_images(model, image)), await embedder(named)
    assert embedder.vectors(sent).tolist() == embedder.vectors(warm).tolist()
    assert len(embedder.rows.calls) == 1


async def test_a_cached_image_is_not_encoded_again(make: MakeEmbedder, model: Model) -> None:
    embedder = make()
    item = with_images(model, picture(1))
    first, second = await embedder(item), await embedder(item)
    assert len(embedder.rows.calls) == 1
    assert first.cached_tokens == (0,) and second.cached_tokens == (TILE_ROWS,)
    assert first.rows == second.rows
    assert embedder.vectors(first)[0, 2] == 2.0 * TILE_ROWS
    assert first.timings.encode_ms == 5.0 and second.timings.encode_ms == 0.0


async def test_an_image_that_is_asked_for_often_at_once_is_encoded_once(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    embedder.rows.open.clear()
    item = with_images(model, picture(1))
    calls = [asyncio.ensure_future(embedder(item, item)) for _ in range(4)]
    await until(lambda: embedder.rows.calls)
    embedder.rows.open.set()
    replies = await asyncio.gather(*calls)
    assert len(embedder.rows.calls) == 1
    assert len({reply.rows for reply in replies}) == 1


async def test_cached_rows_of_another_size_are_not_used(make: MakeEmbedder, model: Model) -> None:
    """A caller that claims another tile count for known bytes must not reach the engine with it."""
    embedder = make()
    await embedder(with_images(model, picture(1)))
    reply = await embedder(with_images(model, picture(1, units=2)))
    assert reply.failures[0].code == "engine_failed"
    assert str(2 * TILE_ROWS) in reply.failures[0].message


async def test_an_image_that_fails_takes_nobody_with_it(make: MakeEmbedder, model: Model) -> None:
    embedder = make()
    await embedder(with_images(model, picture(2)))
    embedder.rows.error = UnsupportedMedia("not an image")
    reply = await embedder(
        text(5),
        with_images(model, picture(1, param="input[1].image")),
        with_images(model, picture(2)),
        text(6),
    )
    assert list(reply.failures) == [1]
    assert (reply.failures[1].code, reply.failures[1].param) == ("unsupported_media", "input[1].image")
    embedder.rows.error = None
    assert not (await embedder(with_images(model, picture(1)))).failures, "an error is not cached"


async def test_each_request_is_told_of_a_shared_failure_in_its_own_terms(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    embedder.rows.open.clear()
    embedder.rows.error = UnsupportedMedia("not an image")
    calls = [
        asyncio.ensure_future(embedder(with_images(model, picture(1, param=f"input[{index}]"))))
        for index in range(3)
    ]
    await until(lambda: embedder.rows.calls)
    embedder.rows.open.set()
    replies = await asyncio.gather(*calls)
    assert [reply.failures[0].param for reply in replies] == ["input[0]", "input[1]", "input[2]"]


@pytest.mark.parametrize("kind", [Overloaded, Unavailable, DeadlineExceeded])
async def test_the_vision_stages_errors_pass_through(
    make: MakeEmbedder, model: Model, kind: type[TesseraError]
) -> None:
    embedder = make()
    embedder.rows.error = kind("as it was said")
    reply = await embedder(with_images(model, picture(1)))
    assert (reply.failures[0].code, reply.failures[0].message) == (kind.code, "as it was said")


async def test_a_cancelled_request_stops_its_encode_and_leaves_the_queue(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    embedder.rows.open.clear()
    embedder.engine.gate.clear()
    call = asyncio.ensure_future(embedder(text(5), with_images(model, picture(1)), text(6)))
    await until(lambda: embedder.rows.calls)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: embedder.rows.cancelled == 1)
    embedder.engine.gate.set()
    await until(lambda: embedder.queued() == 0)


async def test_a_cancelled_leader_does_not_strand_the_others(make: MakeEmbedder, model: Model) -> None:
    embedder = make()
    embedder.rows.open.clear()
    item = with_images(model, picture(1))
    leader, other = (asyncio.ensure_future(embedder(item)) for _ in range(2))
    await until(lambda: embedder.rows.calls)
    leader.cancel()
    await asyncio.sleep(0.01)
    embedder.rows.open.set()
    assert not (await other).failures
    assert (len(embedder.rows.calls), embedder.rows.cancelled) == (1, 0)
    await asyncio.gather(leader, return_exceptions=True)


async def test_a_request_that_is_cancelled_after_a_failure_leaves_no_complaint(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    embedder.engine.gate.clear()
    embedder.rows.error = UnsupportedMedia("not an image")
    call = asyncio.ensure_future(embedder(with_images(model, picture(1)), text(5)))
    await until(lambda: embedder.rows.calls)
    await asyncio.sleep(0.02)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_deadline_is_kept(make: MakeEmbedder) -> None:
    embedder = make()
    embedder.engine.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await embedder(text(5), timeout=0.1)


async def test_a_request_larger_than_the_queue_is_answered_by_an_idle_worker(make: MakeEmbedder) -> None:
    """A 429 would be wrong: no retry could ever succeed."""
    embedder = make(queue=64, batch=16)
    reply = await embedder(*(text(index, 1, 1, 1) for index in range(1, 200)))
    assert reply.failures == {}
    assert embedder.vectors(reply)[:, 0].tolist() == list(range(1, 200))
    assert max(embedder.engine.batches) <= 4


async def test_a_full_queue_refuses_the_next_request(make: MakeEmbedder) -> None:
    embedder = make(queue=16, batch=4)
    embedder.engine.gate.clear()
    calls = [asyncio.ensure_future(embedder(text(1, 1, 1, 1))) for _ in range(6)]
    await until(lambda: any(call.done() for call in calls))
    refused = [call.exception() for call in calls if call.done()]
    assert all(isinstance(error, Overloaded) and error.retry_after is not None for error in refused)
    embedder.engine.gate.set()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    answered = [reply for reply in replies if isinstance(reply, wire.EmbedReply)]
    assert len(answered) >= 4 and not any(reply.failures for reply in answered)
    assert not (await embedder(text(1))).failures


async def test_a_request_that_has_begun_waits_for_room_among_others(make: MakeEmbedder) -> None:
    embedder = make(queue=16, batch=4)
    embedder.engine.gate.clear()
    # The first is in the engine, the others fill the queue but for one.
    calls = [asyncio.ensure_future(embedder(text(1, 1, 1, 1))) for _ in range(4)]
    await until(lambda: embedder.queued() == 12)
    large = asyncio.ensure_future(embedder(*(text(number) for number in range(1, 40))))
    await asyncio.sleep(0.05)
    assert not large.done() and embedder.queued() == 16
    embedder.engine.gate.set()
    reply = await large
    assert not reply.failures and embedder.vectors(reply)[:, 0].tolist() == list(range(1, 40))
    await asyncio.gather(*calls)


async def test_a_request_that_waits_for_room_gives_up_at_its_deadline(make: MakeEmbedder) -> None:
    embedder = make(queue=16, batch=4)
    embedder.engine.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await embedder(*(text(1) for _ in range(40)), timeout=0.3)
    # What the engine has begun is all that is left.
    await until(lambda: embedder.queued() <= 4)


async def test_images_are_encoded_for_the_client_in_the_time_that_is_left(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    item = with_images(model, picture(1))
    request = wire.EmbedRequest(
        request_id="r", items=(item,), timeout_ms=20_000, priority=-7, client="someone"
    )
    await embedder.service.handle(request)
    ((timeout, client, priority),) = embedder.rows.orders
    assert (client, priority) == ("someone", -7)
    assert 0 < timeout < 20.0


async def test_it_says_how_much_it_takes(make: MakeEmbedder) -> None:
    info = await make(queue=1000, batch=100).service.handle(wire.Describe())
    assert isinstance(info, wire.WorkerInfo) and info.tokens == 1100


async def test_frontends_share_what_it_takes(make: MakeEmbedder) -> None:
    service = make(queue=1000, batch=100).service

    async def told(caller: str) -> int:
        info = await service.handle(wire.Describe(caller=caller))
        assert isinstance(info, wire.WorkerInfo)
        return info.tokens

    assert await told("a") == 1100
    assert [await told("b"), await told("a")] == [550, 550]
    # Somebody who only watches takes nothing from them.
    assert [await told(""), await told("a")] == [1100, 550]


async def test_a_text_worker_says_that_it_serves_no_images(make: MakeEmbedder, model: Model) -> None:
    reply = await make(images=False)(with_images(model, picture(1, param="input[0].image")))
    assert reply.failures[0].code == "invalid_input" and "text only" in reply.failures[0].message


async def test_only_its_own_messages_are_answered(make: MakeEmbedder) -> None:
    service = make().service
    assert isinstance(await service.handle(wire.Describe()), wire.WorkerInfo)
    request = wire.EncodeRequest(
        request_id="r", image=picture(1), timeout_ms=1, reader=wire.ReaderInfo(host="h", kinds=())
    )
    with pytest.raises(ProtocolError):
        await service.handle(request)
