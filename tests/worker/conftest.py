"""Stages over the random checkpoint's model, with engines that a test holds and lets go."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from PIL import Image

from tessera import wire
from tessera.engine.batch import Cost, TextBatch, VisionBatch, packed_cost, rows_as_asked
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.launched import Launched
from tessera.models import Model, open_model
from tessera.models.base import STATES, Output, VisionSpec
from tessera.rows import Rows
from tessera.transport.outbox import Outbox
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.geometry import Geometry
from tessera.worker.decoding import ThreadDecoder
from tessera.worker.encode import EncodeService
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.vision_stage import VisionStage
from tessera_tools.random_checkpoint import llama_nemotron_vl, qwen3, towers
from tessera_tools.random_checkpoint.spec import Spec
from tests.rpc.conftest import deployment, store

__all__ = ["deployment", "store"]

WAIT = 20.0
TILE_ROWS = 64


_FULL: dict[str, Spec] = {
    "llama_nemotron_vl": llama_nemotron_vl.FULL,
    "qwen3_vl_embedding": qwen3.VL_FULL,
    "qwen3_embedding": qwen3.FULL,
    "siglip2": towers.SIGLIP2_FULL,
    "clip": towers.CLIP_FULL,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Models at full size, of which no weights are written."""
    found = {}
    for family, spec in _FULL.items():
        path = tmp_path_factory.mktemp("full") / family
        path.mkdir()
        for name, content in spec.files("bfloat16", 0).items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(json.dumps(content))
        found[family] = open_model(path)
    return found


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Model:
    model = open_model(checkpoint)
    assert vision_of(model).rows(1) == TILE_ROWS
    return model


def vision_of(model: Model) -> VisionSpec:
    assert model.vision is not None
    return model.vision


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), seed % 256, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue() + seed.to_bytes(4, "little")


def picture(
    seed: int, *, units: int = 1, grid: tuple[int, int, int] | None = None, param: str = "input[0]"
) -> wire.Image:
    """An image of one tile whose every pixel is ``seed``, and what its sender says of it."""
    data = png(seed)
    return wire.Image(
        digest=blake3(data).digest(), data=data, units=units, rows=units * TILE_ROWS, grid=grid, param=param
    )


def encode_request(image: wire.Image, *, kinds: tuple[str, ...] = ("inline",), timeout: float = 20.0):  # type: ignore[no-untyped-def]
    return wire.EncodeRequest(
        request_id="r",
        image=image,
        timeout_ms=int(timeout * 1e3),
        reader=wire.ReaderInfo(host="elsewhere", kinds=kinds),
    )


class _Held:
    """An engine that is busy while ``gate`` is clear."""

    gate: threading.Event

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def cost(self) -> Cost:
        return packed_cost

    @property
    def depth(self) -> int:
        return 1

    def warm(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class HeldVision(_Held):
    """Writes an image's first pixel into all of its rows. Busy while ``gate`` is clear."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    images: int = 0
    takes_floats: bool = True

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[None]:
        self.images += len(batch.plans)
        self.entered.release()
        assert self.gate.wait(WAIT)
        for image, plan, rows in zip(batch.pixels, batch.plans, out, strict=True):
            assert len(rows) == plan.rows
            rows.fill_(float(image.flat[0]))
        return Launched.of(None)


@dataclass
class SummingText(_Held):
    """A row holds the first token, the number of tokens, and the sum of the first column of the vision rows.

    It also holds the first position of its input's last token, of as many rows as there are.
    """

    output: Output
    batches: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    state_width: int = 0
    """Of hidden states, each of which is its token's id; 0 for an engine that gives none."""
    state_batches: list[int] = field(default_factory=list)

    @property
    def gives(self) -> Collection[str]:
        return (STATES,) if self.state_width else ()

    def launch_named(self, batch: TextBatch) -> Launched[list[Rows]]:
        self.state_batches.append(len(batch.lengths))
        rows = np.repeat(batch.input_ids[:, None].astype(np.float32), self.state_width, axis=1)
        states = Rows(rows, batch.cu_seqlens.astype(np.int64), np.ones(len(rows), np.float32))
        return self.launch(batch).map(lambda own: rows_as_asked({"": own, STATES: states}, batch))

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        assert self.gate.wait(WAIT)
        self.batches.append(len(batch.lengths))
        made = np.zeros((len(batch.lengths), max(4, self.output.width)), np.float32)
        rows = torch.cat(batch.vision)[:, 0].float().numpy() if batch.vision else np.empty(0, np.float32)
        for index, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
            mine = (batch.vision_index >= start) & (batch.vision_index < end)
            made[index, :4] = (
                *(batch.input_ids[start], end - start, rows[mine].sum()),
                batch.positions[:, end - 1].sum(),
            )
        counts = [self.output.rows(length) for length in batch.lengths]
        made = np.repeat(made[:, : self.output.width], counts, axis=0)
        bounds = np.cumsum([0, *counts], dtype=np.int64)
        return Launched.of(Rows(made, bounds, np.full(len(made), 2.0, np.float32)))


def make_stage(model: Model, engine: HeldVision, metrics: WorkerMetrics, *, queue: int = 64) -> VisionStage:
    return VisionStage(
        model,
        vision_of(model),
        engine,
        EngineSettings(max_batch_cost=8, max_queue_cost=queue),
        Placement(device="cpu", dtype="float32"),
        metrics,
        decoder=ThreadDecoder(model, max_pixels=1_000_000),
        threads=1,
    )


def make_outbox(
    model: Model, *, units: int = 64, transport: str = "shm,inline", producer: str = "p"
) -> Outbox:
    geometry = Geometry(
        capacity_rows=units * TILE_ROWS,
        block_rows=64,
        row_width=vision_of(model).row_width,
        dtype="float32",
    )
    return Outbox(producer, geometry, TransportSettings(kind=transport, lease_seconds=2.0))


def worker_info(model: Model, role: str, slabs: tuple[wire.SlabInfo, ...] = ()) -> wire.WorkerInfo:
    return wire.WorkerInfo(
        role=role,
        model="m",
        fingerprint=model.fingerprint,
        dtype="float32",
        width=model.output.width,
        row_width=vision_of(model).row_width,
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
    model: Model

    @classmethod
    def make(
        cls, model: Model, *, queue: int = 64, engine: HeldVision | None = None, **outbox: object
    ) -> Encoder:
        engine, metrics = engine or HeldVision(), WorkerMetrics()
        stage = make_stage(model, engine, metrics, queue=queue)
        made = make_outbox(model, **outbox)  # type: ignore[arg-type]
        info = worker_info(model, "encode", made.infos())
        return cls(EncodeService(stage, made, metrics, info), engine, made, stage, metrics, model)

    def queued(self) -> float:
        return self.metrics.registry.get_sample_value("tessera_units_in_flight") or 0.0

    async def close(self) -> None:
        self.engine.gate.set()
        await self.service.close()
