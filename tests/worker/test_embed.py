"""The embed role: what is checked, what is cached, and who fails."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.settings import EngineSettings
from tessera.errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ProtocolError,
    TesseraError,
    Unavailable,
    UnsupportedMedia,
    UnsupportedOperation,
)
from tessera.image_plan import ImagePlan
from tessera.models import Model
from tessera.models.base import Content, Output, OutputKind, Role, Truncate
from tessera.transport.lending import inline_handle
from tessera.worker.embed import EmbedService
from tessera.worker.image_rows import EncodedImage, ImageRows
from tessera.worker.metrics import WorkerMetrics
from tests.waiting import all_turns, until
from tests.worker.conftest import TILE_ROWS, SummingText, picture, vision_of, worker_info


class Rows:
    """A vision source that fills an image's rows with a number of its own, when the test lets it."""

    def __init__(self, model: Model) -> None:
        self._width = vision_of(model).row_width
        self.lengths: int | None = None
        self.calls: list[wire.Image] = []
        self.cancelled = 0
        self.open = asyncio.Event()
        self.open.set()
        self.error: TesseraError | None = None
        self.units = 0
        self.running_seconds = 0.0
        self.orders: list[tuple[float, str, int]] = []
        self.roundings, self.next = ["fp8"], "fp8"
        self.values: dict[bytes, float] = {}
        """By an image's digest; 2 for all others."""

    async def encode(self, image: wire.Image, request: wire.EmbedRequest, deadline: float) -> EncodedImage:
        self.calls.append(image)
        self.orders.append((deadline - time.monotonic(), request.client, request.priority))
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise type(self.error)(self.error.message, param=image.param)
        value = self.values.get(image.digest, 2.0)
        rows = torch.full((self.lengths or image.rows, self._width), value)
        return EncodedImage(rows, wire.Timings(encode_ms=5.0), rounding=self.next)

    async def close(self) -> None: ...


class Variant:
    """A model that differs from another in some attributes."""

    def __init__(self, model: Model, **changes: object) -> None:
        self._model = model
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


class Embedder:
    def __init__(
        self,
        original: Model,
        *,
        images: bool = True,
        queue: int = 100_000,
        batch: int = 4096,
        cache: int = 1 << 24,
        **changes: object,
    ) -> None:
        # Rows of ``SummingText`` are numbers that a test reads.
        changes.setdefault("output", replace(original.output, unit_length=False))
        model = cast(Model, Variant(original, **changes))
        self.model, self.engine, self.rows = model, SummingText(model.output), Rows(original)
        self.cache = EmbeddingCache(cache)
        self.metrics = WorkerMetrics()
        self.service = EmbedService(
            model,
            self.engine,
            EngineSettings(max_batch_cost=batch, max_queue_cost=queue),
            None
            if model.vision is None
            else ImageRows(
                *(model, model.vision, self.cache, self.rows if images else None),
                *("float32", self.metrics),
            ),
            self.metrics,
            worker_info(original, "embed"),
        )

    def queued(self) -> float:
        return self.metrics.registry.get_sample_value("tessera_queued", {"stage": "text"}) or 0.0

    async def __call__(
        self,
        *items: wire.Item,
        timeout: float = 20.0,
        queries: tuple[bytes, ...] = (),
        outputs: tuple[str, ...] = (),
    ) -> wire.EmbedReply:
        request = wire.EmbedRequest(
            request_id="r", items=items, timeout_ms=int(timeout * 1e3), queries=queries, outputs=outputs
        )
        reply = await self.service.handle(request)
        assert isinstance(reply, wire.EmbedReply)
        return reply

    def vectors(self, reply: wire.EmbedReply) -> np.ndarray:
        return np.frombuffer(reply.outputs[0].rows, np.float32).reshape(-1, reply.outputs[0].width)


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
    cache = embedder.cache
    assert (cache.hits, cache.misses, len(cache)) == (3, 3, 3)


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
    assert np.frombuffer(reply.outputs[0].norms, np.float32).tolist() == [2, 2]


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
    assert first.outputs == second.outputs
    assert embedder.vectors(first)[0, 2] == 2.0 * TILE_ROWS
    assert first.timings.encode_ms == 5.0 and second.timings.encode_ms == 0.0


async def test_cached_images_go_to_the_items_that_have_them(make: MakeEmbedder, model: Model) -> None:
    embedder = make(cache=2 * TILE_ROWS * vision_of(model).row_width * 4)
    one, two, three = map(picture, (1, 2, 3))
    embedder.rows.values = {one.digest: 3.0, two.digest: 5.0, three.digest: 7.0}
    items = with_images(model, one, two), text(9), with_images(model, picture(2))
    for cached in (1, 3):
        reply = await embedder(*items)
        assert embedder.vectors(reply)[:, 2].tolist() == [8.0 * TILE_ROWS, 0.0, 5.0 * TILE_ROWS]
        assert sum(reply.cached_tokens) == cached * TILE_ROWS
    assert reply.cached_tokens == (2 * TILE_ROWS, 0, TILE_ROWS)
    # Where one of a request's images is not in the cache, the others still are.
    reply = await embedder(with_images(model, two), with_images(model, three))
    assert embedder.vectors(reply)[:, 2].tolist() == [5.0 * TILE_ROWS, 7.0 * TILE_ROWS]
    assert reply.cached_tokens == (TILE_ROWS, 0)
    cache = embedder.cache
    # One that two items have is looked up once.
    assert (cache.hits, cache.misses, cache.evictions) == (3, 3, 1)


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
    assert len({bytes(reply.outputs[0].rows) for reply in replies}) == 1


async def test_rows_of_another_size_than_was_asked_for_are_not_used(make: MakeEmbedder, model: Model) -> None:
    embedder = make()
    embedder.rows.lengths = TILE_ROWS
    reply = await embedder(with_images(model, picture(1, units=2)))
    assert reply.failures[0].code == "engine_failed"
    assert str(2 * TILE_ROWS) in reply.failures[0].message


async def test_plans_of_the_same_bytes_share_neither_rows_nor_flights(
    make: MakeEmbedder, model: Model
) -> None:
    """A caller that claims another plan for known bytes must not get, or give, rows that were made by it."""
    embedder = make()
    images = [picture(1), picture(1, units=2), picture(1, grid=(1, 32, 8)), picture(1, grid=(1, 8, 32))]
    items = [with_images(model, image) for image in images]
    embedder.rows.open.clear()
    calls = [asyncio.ensure_future(embedder(item)) for item in items]
    await until(lambda: len(embedder.rows.calls) == 4)
    embedder.rows.open.set()
    assert [(await call).failures for call in calls] == [{}] * 4
    assert [(await embedder(item)).cached_tokens for item in items] == [
        (units * TILE_ROWS,) for units in (1, 2, 1, 1)
    ]
    assert len(embedder.rows.calls) == 4


async def test_positions_are_the_familys_from_tokens_and_plans(make: MakeEmbedder, model: Model) -> None:
    """Also for rows that a client computed itself, and for text between those that have none."""
    seen: list[tuple[int, tuple[ImagePlan, ...]]] = []

    def positions(tokens: np.ndarray, images: Sequence[ImagePlan]) -> np.ndarray:
        seen.append((len(tokens), tuple(images)))
        return np.stack([np.full(len(tokens), axis + len(images), np.int32) for axis in range(3)])

    embedder = make(positions=positions)
    own = np.full((5, vision_of(model).row_width), 3, np.float32)
    handle = inline_handle(own.tobytes(), shape=own.shape, dtype="float32")
    lent = wire.Embeddings(digest=b"d" * 32, handle=handle, grid=(1, 2, 10), param="input[1].image")
    sent = picture(1, grid=(1, 16, 16))
    plans = (sent.plan, ImagePlan(units=0, rows=5, grid=(1, 2, 10)))
    prompt = model.prompt(
        Content(parts=(*plans, "x")), max_tokens=1000, truncate=Truncate.NONE, param="input[1]"
    )
    item = wire.Item(tokens=prompt.tokens.tobytes(), images=(sent, lent), param="input[1]")
    reply = await embedder(text(5, 6), item)
    assert reply.failures == {}
    assert seen == [(2, ()), (len(prompt.tokens), plans)]
    assert embedder.vectors(reply)[:, 2:4].tolist() == [[0, 0 + 1 + 2], [2.0 * TILE_ROWS + 3 * 5, 2 + 3 + 4]]


async def test_a_plan_that_the_family_cannot_place_fails_its_item_before_anything_is_encoded(
    make: MakeEmbedder, model: Model
) -> None:
    def positions(tokens: np.ndarray, images: Sequence[ImagePlan]) -> np.ndarray:
        if images:
            raise InvalidInput("no grid", param="input[1]")
        return np.zeros((1, len(tokens)), np.int32)

    embedder = make(positions=positions)
    reply = await embedder(text(5), with_images(model, picture(1)), text(6))
    assert list(reply.failures) == [1] and reply.failures[1].message == "no grid"
    assert embedder.rows.calls == []
    assert embedder.vectors(reply)[:, 0].tolist() == [5, 6]


async def test_a_row_for_each_token_and_a_number_for_each_input(make: MakeEmbedder) -> None:
    items = (text(5, 6), text(), text(7, 8, 9))
    tokens = make(output=Output(kind=OutputKind.TOKENS, width=6, unit_length=False))
    reply = await tokens(*items)
    assert (reply.outputs[0].width, reply.counts, list(reply.failures)) == (6, (2, 0, 3), [1])
    assert tokens.vectors(reply)[:, 0].tolist() == [5, 5, 7, 7, 7]
    assert np.frombuffer(reply.outputs[0].norms, np.float32).shape == (5,)
    score = make(output=Output(kind=OutputKind.SCORE, width=1, unit_length=False))
    reply = await score(*items)
    assert (reply.outputs[0].width, reply.counts) == (1, (1, 0, 1))
    assert score.vectors(reply).tolist() == [[5], [7]]
    reply = await score(text())
    assert (reply.outputs, reply.counts) == ((), (0,))


async def test_items_are_compared_with_the_queries_that_they_name(make: MakeEmbedder, model: Model) -> None:
    embedder = make(output=Output(kind=OutputKind.TOKENS, width=6, unit_length=False))
    items = [
        text(5, 6),
        text(),
        with_images(model, picture(1), picture(2)),
        text(7, 8, 9),
        text(4, param="input[4]"),
    ]
    rows = embedder.vectors(await embedder(*items))
    bounds = np.cumsum([0, 2, 0, len(items[2].tokens) // 4, 3, 1])
    random = np.random.default_rng(1)
    queries = [random.standard_normal((count, 6), np.float32) for count in (3, 1)]
    numbers = [0, 1, 1, 0, 1]
    reply = await embedder(
        *(msgspec.structs.replace(item, query=number) for item, number in zip(items, numbers, strict=True)),
        queries=tuple(query.tobytes() for query in queries),
    )
    assert (reply.outputs[0].width, reply.counts, list(reply.failures)) == (1, (1, 0, 1, 1, 1), [1])
    expected = [
        np.einsum("id,jd->ij", queries[number], rows[first:last]).max(1).sum()
        for number, first, last in zip(numbers, bounds, bounds[1:], strict=False)
        if last > first
    ]
    assert embedder.vectors(reply)[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert reply.cached_tokens[2] == 2 * TILE_ROWS
    assert np.frombuffer(reply.outputs[0].norms, np.float32).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("kind", "queries", "number"),
    [
        (OutputKind.VECTOR, (bytes(24),), 0),
        (OutputKind.TOKENS, (bytes(20),), 0),
        (OutputKind.TOKENS, (b"",), 0),
        (OutputKind.TOKENS, (bytes(24),), 1),
        (OutputKind.TOKENS, (bytes(24),), -1),
    ],
)
async def test_queries_that_fit_nothing_are_refused(
    make: MakeEmbedder, kind: OutputKind, queries: tuple[bytes, ...], number: int
) -> None:
    embedder = make(output=Output(kind=kind, width=6))
    with pytest.raises(ProtocolError):
        await embedder(msgspec.structs.replace(text(5), query=number), queries=queries)


@pytest.mark.parametrize("cache", [0, 1 << 24])
async def test_an_image_of_many_items_is_made_once_from_the_data_that_came_once(
    make: MakeEmbedder, model: Model, cache: int
) -> None:
    """Small batches: the first items are done before the last ones begin."""
    embedder = make(cache=cache, batch=TILE_ROWS + 50)
    query = picture(1, param="query")
    items = [
        with_images(model, query if index == 0 else msgspec.structs.replace(query, data=b""))
        for index in range(20)
    ]
    reply = await embedder(*items)
    assert not reply.failures and len(embedder.rows.calls) == 1
    assert embedder.vectors(reply)[:, 2].tolist() == [2.0 * TILE_ROWS] * 20
    assert reply.cached_tokens == (0, *[TILE_ROWS] * 19)


async def test_an_image_of_many_items_fails_them_all_by_their_names_for_it(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    embedder.rows.error = UnsupportedMedia("broken")
    items = [with_images(model, picture(1, param=f"documents[{index}]")) for index in range(3)]
    reply = await embedder(*items, text(6))
    assert [reply.failures[index].param for index in range(3)] == [
        f"documents[{index}]" for index in range(3)
    ]
    assert reply.counts == (0, 0, 0, 1) and len(embedder.rows.calls) == 1


async def test_cancelling_ends_the_encoding_of_a_shared_image_and_what_has_not_begun(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make(output=Output(kind=OutputKind.TOKENS, width=6, unit_length=False))
    embedder.rows.open.clear()
    query = np.ones((1, 6), np.float32).tobytes()
    items = [with_images(model, picture(1)) for _ in range(3)] + [text(5), text(6)]
    embedder.engine.gate.clear()
    others = asyncio.ensure_future(embedder(text(9)))
    await until(lambda: embedder.service.batcher.running_seconds)
    call = asyncio.ensure_future(embedder(*items, queries=(query,)))
    await until(lambda: embedder.rows.calls and embedder.service.batcher.queued)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: embedder.rows.cancelled == 1)
    embedder.engine.gate.set()
    await others
    await until(lambda: embedder.service.batcher.queued == 0)
    assert embedder.engine.batches == [1]


async def test_a_model_that_reads_text_alone_refuses_images_by_name(make: MakeEmbedder, model: Model) -> None:
    embedder = make(vision=None)
    handle = inline_handle(b"\0" * 16, shape=(2, 2), dtype="float32")
    own = wire.Embeddings(digest=b"d" * 32, handle=handle, param="input[2].image")
    reply = await embedder(
        text(5),
        with_images(model, picture(1, param="input[1].image")),
        wire.Item(tokens=text(6).tokens, images=(own,), param="input[2]"),
    )
    assert embedder.vectors(reply)[:, 0].tolist() == [5]
    assert [(failure.code, failure.param) for failure in reply.failures.values()] == [
        ("invalid_input", "input[1].image"),
        ("invalid_input", "input[2].image"),
    ]
    info = await embedder.service.handle(wire.Describe(caller="a"))
    assert isinstance(info, wire.WorkerInfo) and info.units == 0 and info.tokens > 0
    assert "tessera_embedding_cache" not in embedder.metrics.render()
    assert embedder.metrics.state().cache is None


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


@pytest.mark.parametrize("end", ["cancelled", "deadline_exceeded"])
async def test_texts_that_nobody_waits_for_leave_the_queue_and_are_counted(
    make: MakeEmbedder, end: str
) -> None:
    embedder = make(batch=4)
    embedder.engine.gate.clear()
    running = asyncio.ensure_future(embedder(text(1)))
    await until(lambda: embedder.service.running_seconds() and not embedder.queued())
    others = asyncio.ensure_future(embedder(text(2, 1, 1, 1), text(3, 1), timeout=60))
    last = asyncio.ensure_future(
        embedder(text(4, 1, 1, 1), text(5, 1), timeout=1.0 if end == "deadline_exceeded" else 60)
    )
    await until(lambda: embedder.queued() == 12)
    if end == "cancelled":
        last.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else DeadlineExceeded):
        await last
    await until(lambda: embedder.queued() == 6)
    value = embedder.metrics.registry.get_sample_value
    assert value("tessera_items_total", {"stage": "embed", "outcome": end}) == 2
    assert value("tessera_tokens_in_flight") == 7
    embedder.engine.gate.set()
    await asyncio.gather(running, others)
    assert value("tessera_tokens_in_flight") == 0
    assert value("tessera_items_total", {"stage": "embed", "outcome": "ok"}) == 3


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
    await until(lambda: embedder.queued() == 16)
    await all_turns()
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


def _ids(*tokens: int) -> wire.Item:
    return wire.Item(tokens=np.array(tokens, "<i4").tobytes(), param="input[0]")


async def test_those_who_ask_for_states_share_a_pass_with_the_others(make: MakeEmbedder) -> None:
    embedder = make()
    width = embedder.engine.state_width = embedder.service.model.text.layer.hidden  # type: ignore[attr-defined]
    embedder.service = EmbedService(
        embedder.model,
        embedder.engine,
        EngineSettings(max_batch_cost=4096, max_queue_cost=100_000),
        None,
        WorkerMetrics(),
        worker_info(embedder.model, "embed"),
    )
    states, others, last = await asyncio.gather(
        embedder(_ids(5, 6, 7), _ids(8), outputs=("states",)),
        embedder(_ids(1, 2), _ids(3)),
        embedder(_ids(9)),
    )
    assert states.outputs[0].width == width and states.counts == (3, 1)
    found = np.frombuffer(states.outputs[0].rows, np.float32).reshape(-1, width)
    assert (found == np.array([[5], [6], [7], [8]])).all()
    assert [*embedder.vectors(others)[:, 0], *embedder.vectors(last)[:, 0]] == [1, 3, 9]
    assert sum(embedder.engine.batches) == 5
    await embedder.service.close()


async def test_an_engine_without_states_says_so(make: MakeEmbedder) -> None:
    embedder = make()
    with pytest.raises(UnsupportedOperation, match="engine: torch"):
        await embedder(_ids(5), outputs=("states",))
    assert (await embedder(_ids(5))).counts == (1,)


async def test_vision_rows_are_given_without_the_text_stage(make: MakeEmbedder, model: Model) -> None:
    embedder, image = make(), picture(1)
    placeholder = int(cast(Any, model).image_token_id)
    item = wire.Item(
        tokens=np.full(TILE_ROWS, placeholder, "<i4").tobytes(), images=(image,), param="input[0]"
    )
    reply = await embedder(item, outputs=("vision",))
    assert (reply.outputs[0].width, reply.counts) == (vision_of(model).row_width, (TILE_ROWS,))
    assert (embedder.vectors(reply) == 2).all()
    assert embedder.engine.batches == []
    more = msgspec.structs.replace(item, tokens=item.tokens + np.int32(5).tobytes())
    for wrong in (more, _ids(5), msgspec.structs.replace(item, tokens=item.tokens[4:])):
        with pytest.raises(InvalidInput):
            await embedder(wrong, outputs=("vision",))
    with pytest.raises(ProtocolError, match="queries"):
        await embedder(item, outputs=("vision",), queries=(b"",))
