"""Stages over the random checkpoint's model, with engines that a test holds and lets go."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from blake3 import blake3
from PIL import Image

from tessera import wire
from tessera.engine.batch import Cost, TextBatch, TextVectors, packed_cost
from tessera.engine.settings import EngineSettings
from tessera.launched import Launched
from tessera.models import Model, open_model
from tessera.transport.outbox import Outbox, OutboxConfig
from tessera.worker.decoding import ThreadDecoder
from tessera.worker.encode import EncodeService
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.vision_stage import VisionStage
from tests.rpc.conftest import deployment, store

__all__ = ["deployment", "store"]

WAIT = 20.0


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Model:
    return open_model(checkpoint)


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), seed % 256, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue() + seed.to_bytes(4, "little")


def picture(seed: int, *, tiles: int = 1, param: str = "input[0]") -> wire.Image:
    """A one-tile image whose every pixel is ``seed``."""
    data = png(seed)
    return wire.Image(digest=blake3(data).digest(), data=data, tiles=tiles, param=param)


def encode_request(image: wire.Image, *, kinds: tuple[str, ...] = ("inline",), timeout: float = 20.0):  # type: ignore[no-untyped-def]
    return wire.EncodeRequest(
        request_id="r",
        image=image,
        timeout_ms=int(timeout * 1e3),
        reader=wire.ReaderInfo(host="elsewhere", kinds=kinds),
    )


@dataclass
class HeldVision:
    """Writes an image's first pixel into all of its rows. Busy while ``gate`` is clear."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    images: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 1

    def warm(self) -> None: ...

    def launch(self, tiles: Sequence[npt.NDArray[np.uint8]], out: Sequence[torch.Tensor]) -> Launched[None]:
        self.images += len(tiles)
        self.entered.release()
        assert self.gate.wait(WAIT)
        for image, rows in zip(tiles, out, strict=True):
            rows.fill_(float(image[0, 0, 0, 0]))
        return Launched.of(None)

    def close(self) -> None: ...


@dataclass
class SummingText:
    """A vector holds the first token, the number of tokens, and the sum of the first column of the rows."""

    hidden: int
    batches: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 1

    def warm(self) -> None: ...

    def launch(self, batch: TextBatch) -> Launched[TextVectors]:
        assert self.gate.wait(WAIT)
        self.batches.append(len(batch.lengths))
        made = np.zeros((len(batch.lengths), self.hidden), np.float32)
        rows = torch.cat(batch.vision)[:, 0].float().numpy() if batch.vision else np.empty(0, np.float32)
        for index, (start, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
            mine = (batch.vision_index >= start) & (batch.vision_index < end)
            made[index, :3] = batch.input_ids[start], end - start, rows[mine].sum()
        return Launched.of(TextVectors(vectors=made, norms=np.full(len(made), 2.0, np.float32)))

    def close(self) -> None: ...


def make_stage(model: Model, engine: HeldVision, metrics: WorkerMetrics, *, queue: int = 64) -> VisionStage:
    return VisionStage(
        model,
        engine,
        EngineSettings(max_batch_cost=8, max_queue_cost=queue),
        metrics,
        decoder=ThreadDecoder(model, max_pixels=1_000_000),
        threads=1,
    )


def make_outbox(
    model: Model, *, units: int = 64, transport: str = "shm,inline", producer: str = "p"
) -> Outbox:
    return Outbox(
        OutboxConfig(
            producer=producer,
            capacity_rows=units * model.tokens_per_tile,
            unit_rows=model.tokens_per_tile,
            hidden=model.hidden,
            lease_seconds=2.0,
            transport=transport,
        )
    )


def worker_info(model: Model, role: str, slabs: tuple[wire.SlabInfo, ...] = ()) -> wire.WorkerInfo:
    return wire.WorkerInfo(
        role=role,
        model="m",
        fingerprint=model.fingerprint,
        dtype="float32",
        hidden=model.hidden,
        images=True,
        slabs=slabs,
    )


@dataclass
class Encoder:
    """An encode service with everything a test looks at."""

    service: EncodeService
    engine: HeldVision
    outbox: Outbox
    stage: VisionStage
    metrics: WorkerMetrics

    @classmethod
    def make(cls, model: Model, *, queue: int = 64, **outbox: object) -> Encoder:
        engine, metrics = HeldVision(), WorkerMetrics()
        stage = make_stage(model, engine, metrics, queue=queue)
        made = make_outbox(model, **outbox)  # type: ignore[arg-type]
        info = worker_info(model, "encode", made.infos())
        return cls(EncodeService(stage, made, metrics, info), engine, made, stage, metrics)

    def queued(self) -> float:
        return self.metrics.registry.get_sample_value("tessera_tiles_in_flight") or 0.0

    async def close(self) -> None:
        self.engine.gate.set()
        await self.service.close()
