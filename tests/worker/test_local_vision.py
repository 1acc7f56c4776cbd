"""Images that are encoded in the worker that answers, where their row is the output."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from opentelemetry.trace import INVALID_SPAN

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.no_text import NoText
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import DeadlineExceeded
from tessera.models import Model, open_model
from tessera.models.base import Pixels
from tessera.worker.decoding import ThreadDecoder
from tessera.worker.embed import EmbedService
from tessera.worker.image_rows import ImageRows
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.vision_stage import LocalVision, VisionStage
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.towers import CLIP_TINY
from tests.waiting import until
from tests.worker.conftest import HeldVision, make_stage, picture, png, vision_of


@dataclass
class Towers:
    """A service of images alone, with an engine that writes an image's first pixel into its row."""

    engine: HeldVision
    stage: VisionStage
    service: EmbedService
    model: Model

    def request(self, *seeds: int, seconds: float = 20.0, client: str = "") -> wire.EmbedRequest:
        token = np.array([self.model.vocab_size], "<i4").tobytes()
        items = tuple(
            wire.Item(
                tokens=token,
                images=(msgspec.structs.replace(picture(seed), rows=1),),
                param=f"input[{index}]",
            )
            for index, seed in enumerate(seeds)
        )
        return wire.EmbedRequest(request_id="r", items=items, timeout_ms=int(seconds * 1e3), client=client)

    async def lengths(self, *seeds: int, seconds: float = 20.0, client: str = "") -> list[float]:
        """The lengths that the towers gave the images' rows."""
        reply = await self.service.handle(self.request(*seeds, seconds=seconds, client=client))
        assert isinstance(reply, wire.EmbedReply) and not reply.failures
        rows = np.frombuffer(reply.outputs[0].rows, np.float32).reshape(len(seeds), reply.outputs[0].width)
        np.testing.assert_allclose(rows, 1 / np.sqrt(reply.outputs[0].width), rtol=1e-5)
        return [float(length) for length in np.frombuffer(reply.outputs[0].norms, np.float32)]

    def length(self, seed: int) -> float:
        return float(seed * np.sqrt(self.model.output.width))


class HeldDecoder(ThreadDecoder):
    """Decodes once ``gate`` is set; ``decoded`` are the files."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, max_pixels=1_000_000)
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)
        self.decoded: list[bytes] = []

    def decode(self, data: bytes, *, param: str) -> Pixels:
        self.entered.release()
        assert self.gate.wait(60)
        self.decoded.append(data)
        return super().decode(data, param=param)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = tmp_path_factory.mktemp("clip") / "model"
    write_checkpoint(path, CLIP_TINY)
    return open_model(path)


@pytest.fixture
async def towers(clip: Model) -> AsyncIterator[Towers]:
    engine, metrics = HeldVision(), WorkerMetrics()
    stage = make_stage(clip, engine, metrics)
    vision = vision_of(clip)
    source = LocalVision(stage, vision, Placement(device="cpu", dtype="float32"))
    images = ImageRows(clip, vision, EmbeddingCache(1 << 20), source, "float32", metrics)
    info = wire.WorkerInfo(
        role="encode",
        model="m",
        fingerprint=clip.fingerprint,
        dtype="float32",
        width=clip.output.width,
        row_width=vision.row_width,
        images=True,
    )
    settings = EngineSettings(max_batch_cost=8, max_queue_cost=64)
    service = EmbedService(clip, NoText(), settings, images, metrics, info)
    yield Towers(engine, stage, service, clip)
    engine.gate.set()
    await service.close()


async def test_rows_are_those_of_their_images(towers: Towers) -> None:
    """Never seen, cached, and twice in a request."""
    expected = pytest.approx([towers.length(seed) for seed in (5, 9, 5, 7)], rel=1e-5)
    assert await towers.lengths(5, 9, 5, 7) == expected
    assert towers.engine.images == 3
    assert await towers.lengths(5, 9, 5, 7) == expected
    assert towers.engine.images == 3


async def test_no_row_in_the_cache_keeps_those_of_its_batch(towers: Towers) -> None:
    """A cache counts the bytes of rows, which must be all that is kept for them."""
    engine, images = towers.engine, towers.service.images
    assert images is not None
    engine.gate.clear()
    first = asyncio.ensure_future(towers.lengths(1))
    await asyncio.to_thread(engine.entered.acquire)
    rest = asyncio.ensure_future(towers.lengths(2, 3, 4))
    await until(lambda: towers.stage._batcher.queued == 3)
    engine.gate.set()
    await asyncio.gather(first, rest)
    assert engine.entered.acquire(blocking=False) and not engine.entered.acquire(blocking=False)
    for item in towers.request(1, 2, 3, 4).items:
        (image,) = item.images
        assert isinstance(image, wire.Image)
        kept = images.hit(image, INVALID_SPAN)
        assert kept is not None and kept.rows.untyped_storage().nbytes() == kept.rows.nbytes


async def test_rows_go_where_they_are_wanted(towers: Towers) -> None:
    """In one batch, into memory of the caller and into the stage's own."""
    request = towers.request(1, 2, 3)
    files = [item.images[0] for item in request.items]
    images = [await towers.stage.preprocess(file, request) for file in files]  # type: ignore[arg-type]
    placed = torch.empty(1, towers.model.output.width)
    places = (None, placed, None)
    found = await asyncio.gather(
        *(towers.stage.encode(image, out, request) for image, out in zip(images, places, strict=True))
    )
    for seed, (rows, _), place in zip((1, 2, 3), found, places, strict=True):
        assert (rows == seed).all() and rows.dtype == torch.float32
        assert place is None or rows is place


async def test_an_image_that_nobody_waits_for_is_not_decoded(towers: Towers) -> None:
    held = HeldDecoder(towers.model)
    towers.stage._decoder = held
    first, left, last = (asyncio.ensure_future(towers.lengths(seed)) for seed in (1, 2, 3))
    await asyncio.to_thread(held.entered.acquire)
    left.cancel()
    await asyncio.wait({left})
    held.gate.set()
    assert await first + await last == pytest.approx([towers.length(1), towers.length(3)], rel=1e-5)
    assert held.decoded == [png(1), png(3)]


async def test_pictures_are_decoded_in_turns_by_key(towers: Towers) -> None:
    """Another key's is at latest the third of 49; of what is late, or of who has left, nothing is."""
    towers.stage._decoder = held = HeldDecoder(towers.model)
    alice = [
        asyncio.ensure_future(towers.lengths(*range(12 * at + 1, 12 * at + 13), client="alice"))
        for at in range(3)
    ]
    late = asyncio.ensure_future(towers.lengths(*range(37, 49), seconds=0.2, client="alice"))
    await asyncio.to_thread(held.entered.acquire)
    with pytest.raises(DeadlineExceeded):
        await late
    bob = asyncio.ensure_future(towers.lengths(99, client="bob"))
    await until(lambda: towers.stage._threads.turns.waiting == 36)
    alice[2].cancel()
    held.gate.set()
    assert await bob == pytest.approx([towers.length(99)], rel=1e-5)
    await asyncio.gather(*alice[:2])
    assert held.decoded.index(png(99)) <= 2
    assert set(held.decoded) == {png(seed) for seed in (*range(1, 25), 99)}


async def test_a_deadline_ends_its_own_request_alone(towers: Towers) -> None:
    towers.engine.gate.clear()
    short = asyncio.ensure_future(towers.lengths(4, seconds=0.3))
    await asyncio.to_thread(towers.engine.entered.acquire)
    long = asyncio.ensure_future(towers.lengths(4))
    with pytest.raises(DeadlineExceeded):
        await short
    towers.engine.gate.set()
    assert await long == pytest.approx([towers.length(4)], rel=1e-5)
    assert towers.engine.images == 1


async def test_a_request_that_is_over_leaves_the_stage_empty(towers: Towers) -> None:
    towers.engine.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await towers.lengths(6, 8, seconds=0.3)
    towers.engine.gate.set()
    await until(lambda: towers.stage._admitted.used == 0)
