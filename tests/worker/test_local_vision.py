"""Images that are encoded in the worker that answers, where their row is the output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.no_text import NoText
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import DeadlineExceeded
from tessera.models import Model, open_model
from tessera.worker.embed import EmbedService
from tessera.worker.image_rows import ImageRows
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.vision_stage import LocalVision, VisionStage
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.towers import CLIP_TINY
from tests.rpc.conftest import until
from tests.worker.conftest import HeldVision, make_stage, picture, vision_of


@dataclass
class Towers:
    """A service of images alone, with an engine that writes an image's first pixel into its row."""

    engine: HeldVision
    stage: VisionStage
    service: EmbedService
    model: Model

    def request(self, *seeds: int, seconds: float = 20.0) -> wire.EmbedRequest:
        token = np.array([self.model.vocab_size], "<i4").tobytes()
        items = tuple(
            wire.Item(
                tokens=token,
                images=(msgspec.structs.replace(picture(seed), rows=1),),
                param=f"input[{index}]",
            )
            for index, seed in enumerate(seeds)
        )
        return wire.EmbedRequest(request_id="r", items=items, timeout_ms=int(seconds * 1e3))

    async def lengths(self, *seeds: int, seconds: float = 20.0) -> list[float]:
        """The lengths that the towers gave the images' rows."""
        reply = await self.service.handle(self.request(*seeds, seconds=seconds))
        assert isinstance(reply, wire.EmbedReply) and not reply.failures
        rows = np.frombuffer(reply.rows, np.float32).reshape(len(seeds), reply.width)
        np.testing.assert_allclose(rows, 1 / np.sqrt(reply.width), rtol=1e-5)
        return [float(length) for length in np.frombuffer(reply.norms, np.float32)]

    def length(self, seed: int) -> float:
        return float(seed * np.sqrt(self.model.output.width))


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


async def test_no_row_keeps_those_of_its_batch(towers: Towers) -> None:
    """A cache counts the bytes of rows, which must be all that is kept for them."""
    request = towers.request(1, 2, 3)
    images = [await towers.stage.preprocess(item.images[0]) for item in request.items]  # type: ignore[arg-type]
    placed = torch.empty(1, towers.model.output.width)
    places = (None, placed, None)
    found = await asyncio.gather(
        *(towers.stage.encode(image, out, request) for image, out in zip(images, places, strict=True))
    )
    for seed, (rows, _), place in zip((1, 2, 3), found, places, strict=True):
        assert (rows == seed).all() and rows.dtype == torch.float32
        assert rows.untyped_storage().nbytes() == rows.nbytes
        assert place is None or rows is place


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
