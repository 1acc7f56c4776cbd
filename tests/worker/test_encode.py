"""The encode role: a slot is never somebody else's while the engine may write to it, and never lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from tessera import wire
from tessera.errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ProtocolError,
    RequestCancelled,
    TesseraError,
    TransportUnavailable,
    UnsupportedMedia,
)
from tessera.models import Model
from tessera.transport.host import host_id
from tests.waiting import until
from tests.worker.conftest import TILE_ROWS, Encoder, HeldVision, encode_request, picture, vision_of


@pytest.fixture
async def encoder(model: Model) -> AsyncIterator[Encoder]:
    made = Encoder.make(model)
    yield made
    await made.close()


def empty(encoder: Encoder) -> bool:
    stats = encoder.outbox.slab.stats()
    return (stats.held, stats.leased, stats.used_bytes, encoder.queued()) == (0, 0, 0, 0.0)


async def test_rows_come_back_with_what_they_cost(encoder: Encoder, model: Model) -> None:
    reply = await encoder.service.handle(encode_request(picture(7)))
    assert isinstance(reply, wire.EncodeReply)
    rows = np.frombuffer(reply.handle.data, np.float32).reshape(reply.handle.shape)
    assert rows.shape == (TILE_ROWS, vision_of(model).row_width) and (rows == 7).all()
    assert reply.timings.preprocess_ms > 0
    assert empty(encoder)


async def test_a_slot_is_held_until_the_engine_is_done_with_it(encoder: Encoder) -> None:
    encoder.engine.gate.clear()
    task = asyncio.ensure_future(encoder.service.handle(encode_request(picture(1))))
    await asyncio.to_thread(encoder.engine.entered.acquire)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)
    assert encoder.outbox.slab.stats().held == 1, "the engine is still writing"
    encoder.engine.gate.set()
    await until(lambda: empty(encoder))


async def test_a_cancellation_in_the_moment_of_the_result_loses_no_slot(encoder: Encoder) -> None:
    encoder.engine.gate.clear()
    task = asyncio.ensure_future(encoder.service.handle(encode_request(picture(1))))
    await asyncio.to_thread(encoder.engine.entered.acquire)
    encoder.engine.gate.set()
    # Blocks the loop on purpose: the engine thread's answer and the cancellation then wait in the same turn.
    time.sleep(0.2)  # noqa: ASYNC251
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: empty(encoder))


async def test_a_slot_that_cannot_be_published_is_freed(encoder: Encoder) -> None:
    with pytest.raises(TransportUnavailable):
        await encoder.service.handle(encode_request(picture(1), kinds=("pigeon",)))
    assert empty(encoder)


async def test_a_reader_that_has_gone_has_its_slot_freed_at_once(model: Model) -> None:
    encoder = Encoder.make(model)
    request = encode_request(picture(1), kinds=("shm",))
    request = msgspec.structs.replace(
        request, reader=wire.ReaderInfo(host=host_id(), kinds=("shm",)), call="reader-1"
    )
    await encoder.service.handle(request)
    assert encoder.outbox.slab.stats().leased == 1
    assert isinstance(await encoder.service.handle(wire.Forget(call="reader-1")), wire.Forgotten)
    assert empty(encoder)
    assert encoder.outbox.slab.stats().expired == 0
    # Twice, or for a call that never was, does no harm.
    await encoder.service.handle(wire.Forget(call="reader-1"))
    await encoder.service.handle(wire.Forget(call="reader-2"))
    await encoder.close()


async def test_a_reader_that_goes_before_its_rows_are_there_gets_no_lease(model: Model) -> None:
    encoder = Encoder.make(model)
    encoder.engine.gate.clear()
    request = msgspec.structs.replace(
        encode_request(picture(1)),
        reader=wire.ReaderInfo(host=host_id(), kinds=("shm",)),
        call="reader-1",
    )
    task = asyncio.ensure_future(encoder.service.handle(request))
    await asyncio.to_thread(encoder.engine.entered.acquire)
    await encoder.service.handle(wire.Forget(call="reader-1"))
    encoder.engine.gate.set()
    with pytest.raises(RequestCancelled):
        await task
    assert empty(encoder)
    assert encoder.outbox.slab.stats().published == 0
    await encoder.close()


async def test_an_image_of_another_size_than_announced_names_both(encoder: Encoder) -> None:
    with pytest.raises(
        InvalidInput, match=f"became 1 units and {TILE_ROWS} rows, but its prompt was built for 3 units"
    ) as caught:
        await encoder.service.handle(encode_request(picture(1, units=3, param="input[4]")))
    assert caught.value.param == "input[4]"
    assert empty(encoder)


async def test_an_image_of_another_grid_than_announced_names_both(encoder: Encoder) -> None:
    with pytest.raises(InvalidInput, match=r"became .* rows, but .* of a grid \(1, 2, 2\)") as caught:
        await encoder.service.handle(encode_request(picture(1, grid=(1, 2, 2), param="input[4]")))
    assert caught.value.param == "input[4]"
    assert empty(encoder)


@pytest.mark.parametrize(
    ("units", "rows"), [(0, TILE_ROWS), (-1, TILE_ROWS), (8, 8 * TILE_ROWS), (1, 0), (1, 1 << 40)]
)
async def test_a_plan_that_no_image_has_is_refused_before_it_is_decoded(
    encoder: Encoder, units: int, rows: int
) -> None:
    image = msgspec.structs.replace(picture(1), data=b"never read", units=units, rows=rows)
    with pytest.raises(InvalidInput, match=f"no image has {units} units and {rows} rows") as caught:
        await encoder.service.handle(encode_request(image))
    assert caught.value.param == "input[0]"
    assert empty(encoder)


async def test_a_deadline_ends_the_wait(encoder: Encoder) -> None:
    encoder.engine.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await encoder.service.handle(encode_request(picture(1), timeout=0.2))
    encoder.engine.gate.set()
    await until(lambda: empty(encoder))


async def test_more_than_the_stage_may_hold_is_refused_before_it_is_decoded(model: Model) -> None:
    encoder = Encoder.make(model, queue=8)
    encoder.engine.gate.clear()
    tasks = [
        asyncio.ensure_future(encoder.service.handle(encode_request(picture(seed)))) for seed in range(8)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await encoder.service.handle(encode_request(picture(9)))
    assert caught.value.retry_after is not None and caught.value.retry_after > 0
    encoder.engine.gate.set()
    await asyncio.gather(*tasks)
    await encoder.service.handle(encode_request(picture(9)))
    assert empty(encoder)
    await encoder.close()


async def test_only_its_own_messages_are_answered(encoder: Encoder) -> None:
    assert isinstance(await encoder.service.handle(wire.Describe()), wire.WorkerInfo)
    with pytest.raises(ProtocolError):
        await encoder.service.handle(wire.EmbedRequest(request_id="r", items=(), timeout_ms=1000))


@pytest.mark.parametrize("seed", range(2))
async def test_cancellations_at_every_stage_lose_no_slot(model: Model, seed: int) -> None:
    """Fewer slots than requests, so that some wait for one as well."""
    chance = random.Random(seed)
    encoder = Encoder.make(model, queue=1000, units=4)
    ends = {"answered": 0, "cancelled": 0, "refused": 0}

    async def one(number: int) -> None:
        kinds = chance.choice((("inline",), ("shm", "inline"), ("pigeon",)))
        try:
            async with asyncio.timeout(chance.choice((0.001, 0.01, 0.03, 0.1, 10))):
                await encoder.service.handle(encode_request(picture(number), kinds=kinds))
            ends["answered"] += 1
        except TimeoutError:
            ends["cancelled"] += 1
        except TesseraError:
            ends["refused"] += 1

    for start in range(0, 250, 25):
        await asyncio.gather(*(one(number) for number in range(start, start + 25)))
    assert min(ends.values()) > 10, ends
    # Nobody reads the shared memory here: those leases run out.
    await until(lambda: empty(encoder))
    await encoder.close()


def pixels(
    values: np.ndarray, encoder: Encoder, *, kind: Literal["float32", "float16"] = "float32"
) -> wire.Image:
    """One tile that its client normalised."""
    shape = vision_of(encoder.model).unit_shape
    data = np.broadcast_to(values.astype(kind), (1, *shape)).tobytes()
    return wire.Image(
        digest=blake3(data).digest(), data=data, units=1, rows=TILE_ROWS, pixels=kind, param="pixel_values[3]"
    )


@pytest.mark.parametrize("kind", ["float32", "float16"])
async def test_pixels_of_a_client_come_to_the_engine_as_they_are(
    encoder: Encoder, kind: Literal["float32", "float16"]
) -> None:
    value = np.array(-0.12345679).astype(kind)
    reply = await encoder.service.handle(encode_request(pixels(value, encoder, kind=kind)))
    assert isinstance(reply, wire.EncodeReply)
    assert (np.frombuffer(reply.handle.data, np.float32) == np.float32(value)).all()
    assert empty(encoder)


async def test_pixels_that_are_not_of_their_size_name_the_image(encoder: Encoder) -> None:
    image = pixels(np.array(0.5), encoder)
    for wrong in (
        msgspec.structs.replace(image, data=image.data[:-4]),
        msgspec.structs.replace(image, data=b""),
        msgspec.structs.replace(image, pixels="float16"),
        msgspec.structs.replace(image, units=2, rows=2 * TILE_ROWS),
        msgspec.structs.replace(image, rows=TILE_ROWS - 1),
    ):
        with pytest.raises(InvalidInput) as caught:
            await encoder.service.handle(encode_request(wrong))
        assert caught.value.param == "pixel_values[3]"
    assert empty(encoder)


async def test_an_engine_of_bytes_alone_refuses_pixels_and_goes_on(model: Model) -> None:
    encoder = Encoder.make(model, engine=HeldVision(takes_floats=False))
    with pytest.raises(UnsupportedMedia, match="engine: torch") as caught:
        await encoder.service.handle(encode_request(pixels(np.array(0.5), encoder)))
    assert caught.value.param == "pixel_values[3]"
    assert isinstance(await encoder.service.handle(encode_request(picture(7))), wire.EncodeReply)
    assert empty(encoder)
    await encoder.close()
