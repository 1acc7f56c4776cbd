"""Rows that are no numbers or of another length than is promised: found, and each its own input's error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.batch import TextBatch
from tessera.engine.settings import EngineSettings
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.local import LocalEmbedder
from tessera.launched import Launched
from tessera.models import Model
from tessera.models.base import SCORES, STATES, Output, OutputKind, Outputs
from tessera.rows import Rows
from tessera.tasks import Deadline
from tessera.worker.embed import EmbedService
from tessera.worker.image_rows import CacheFill
from tessera.worker.metrics import WorkerMetrics
from tests.worker.conftest import TILE_ROWS, SummingText, picture, worker_info
from tests.worker.test_embed import MakeEmbedder, Variant, make, text, with_images

__all__ = ["make"]

VECTOR = Output(kind=OutputKind.VECTOR, width=4)
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def faulty_rows(values: np.ndarray, norms: np.ndarray, output: Output) -> np.ndarray | None:
    return Rows(values, np.arange(len(values) + 1), norms).faulty(unit_length=output.unit_length)


def unit(count: int) -> np.ndarray:
    rows = np.random.default_rng(count).standard_normal((count, 4)).astype(np.float32)
    made: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return made


@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("output", [VECTOR, replace(VECTOR, unit_length=False)], ids=["unit", "any"])
def test_sound_rows_pass(count: int, output: Output) -> None:
    rows, norms = unit(count), np.ones(count, np.float32)
    assert faulty_rows(rows, norms, output) is None
    # As they are in bfloat16.
    rounded = torch.from_numpy(rows).bfloat16().float().numpy()
    assert faulty_rows(rounded, norms, output) is None
    assert (faulty_rows(2 * rows, norms, output) is None) is not output.unit_length
    # Each is finite, and its square is not.
    assert (faulty_rows(rows * np.float32(1e30), norms, output) is None) is not output.unit_length


@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("output", [VECTOR, replace(VECTOR, unit_length=False)], ids=["unit", "any"])
def test_rows_that_are_no_numbers_are_found(count: int, value: float, output: Output) -> None:
    rows, norms = unit(count), np.ones(count, np.float32)
    rows[count // 2, 3] = value
    found = faulty_rows(rows, norms, output)
    assert found is not None and np.flatnonzero(found).tolist() == [count // 2]


@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 1e25])
def test_rows_of_another_length_are_found(count: int, scale: float) -> None:
    rows, norms = unit(count), np.ones(count, np.float32)
    rows[count // 2] *= np.float32(scale)
    found = faulty_rows(rows, norms, VECTOR)
    assert found is not None and np.flatnonzero(found).tolist() == [count // 2]
    norms[-1] = np.inf
    found = faulty_rows(rows, norms, VECTOR)
    assert found is not None and found[-1]


class DamagedText(SummingText):
    """Unit rows, one of which is damaged for each input whose first token is 13."""

    def launch(self, batch: TextBatch) -> Launched[Rows]:
        counts = [self.output.rows(length) for length in batch.lengths]
        bounds = np.cumsum([0, *counts], dtype=np.int64)
        rows = np.zeros((bounds[-1], self.output.width), np.float32)
        rows[:, 0] = 1.0
        for start, row in zip(batch.cu_seqlens, bounds[1:], strict=False):
            if batch.input_ids[start] == 13:
                rows[row - 1, -1] = np.nan
        return Launched.of(Rows(rows, bounds, np.ones(len(rows), np.float32)))

    def launch_named(self, batch: TextBatch) -> Launched[list[Rows]]:
        rows = np.ones((len(batch.input_ids), self.state_width), np.float32)
        for start, stop in pairwise(batch.cu_seqlens.tolist()):
            if batch.input_ids[start] == 13:
                rows[stop - 1, 0] = np.inf
        whole = Rows(rows, batch.cu_seqlens.astype(np.int64), np.ones(len(rows), np.float32))
        return Launched.of(list(whole))


OUTPUTS = {
    "vectors": VECTOR,
    "token vectors": Output(kind=OutputKind.TOKENS, width=4),
    "scores": SCORES,
}


@pytest.fixture(params=OUTPUTS.values(), ids=OUTPUTS)
async def service(request: pytest.FixtureRequest, model: Model) -> AsyncIterator[EmbedService]:
    variant = cast(Model, Variant(model, output=request.param))
    width = Outputs.of_model(model).by_name[STATES].width
    engine = DamagedText(request.param, state_width=width)
    settings = EngineSettings(max_batch_cost=64, max_queue_cost=10_000)
    made = EmbedService(variant, engine, settings, None, WorkerMetrics(), worker_info(model, "embed"))
    yield made
    await made.close()


async def ask(service: EmbedService, *items: wire.Item, **options: Any) -> wire.EmbedReply:
    reply = await service.handle(wire.EmbedRequest(request_id="r", items=items, timeout_ms=20_000, **options))
    assert isinstance(reply, wire.EmbedReply)
    return reply


def named(*tokens: Sequence[int]) -> list[wire.Item]:
    return [text(*each, param=f"input[{index}]") for index, each in enumerate(tokens)]


# More than fit a batch go into the queue one after another, and fewer at once.
@pytest.mark.parametrize("more", [0, 60], ids=["at once", "in turn"])
async def test_an_input_with_a_bad_row_fails_alone(service: EmbedService, more: int) -> None:
    items = named((1, 2), (13, 5, 6), (3,), (13,), *[(7, 8)] * more)
    reply = await ask(service, *items)
    assert {index: failure.param for index, failure in reply.failures.items()} == {
        1: "input[1]",
        3: "input[3]",
    }
    for index, failure in reply.failures.items():
        assert failure.code == "engine_failed" and failure.message.startswith(f"input[{index}]: ")
    rows = np.frombuffer(reply.outputs[0].rows, np.float32).reshape(-1, reply.outputs[0].width)
    assert len(rows) == sum(reply.counts) == len(reply.outputs[0].norms) // 4
    assert reply.counts[1] == reply.counts[3] == 0 and reply.counts[0] > 0 and np.isfinite(rows).all()
    alone = await ask(service, items[3])
    assert list(alone.failures) == [0] and (alone.outputs, alone.counts) == ((), (0,))


async def test_states_are_looked_at_too(service: EmbedService) -> None:
    reply = await ask(service, *named((1, 2), (13, 5), (4,)), outputs=("states",))
    assert list(reply.failures) == [1] and reply.counts == (2, 0, 1)


@pytest.mark.parametrize("service", [OUTPUTS["token vectors"]], indirect=True)
async def test_a_document_with_a_bad_row_has_no_score(service: EmbedService) -> None:
    query = np.ones((2, 4), np.float32).tobytes()
    reply = await ask(service, *named((1, 2), (13, 5), (4,)), queries=(query,))
    assert list(reply.failures) == [1] and reply.failures[1].param == "input[1]"
    assert reply.counts == (1, 0, 1)
    reply = await ask(service, *named((1, 2)), queries=(np.full((2, 4), np.inf, np.float32).tobytes(),))
    assert list(reply.failures) == [0]


@pytest.mark.parametrize("service", [VECTOR], indirect=True)
async def test_an_embedder_of_one_worker_gives_a_stages_rows(service: EmbedService, model: Model) -> None:
    embedder = LocalEmbedder(service.handle, service.model)
    answer = await embedder.embed(
        named((1, 2), (13, 5), (4,)),
        Call(request_id="r", deadline=Deadline.after(60), outputs=(STATES,)),
    )
    assert answer.rows.values.shape == (5, Outputs.of_model(model).by_name[STATES].width)
    assert list(answer.errors) == [1] and answer.rows.bounds.tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize("service", [VECTOR], indirect=True)
async def test_a_request_that_cannot_be_begun_leaves_nothing(service: EmbedService) -> None:
    def positions(tokens: np.ndarray, images: object) -> np.ndarray:
        if tokens[0] == 4:
            raise ZeroDivisionError("a bug")
        return np.zeros((1, len(tokens)), np.int32)

    cast(Any, service.model).positions = positions
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await service.handle(
                wire.EmbedRequest(request_id="r", items=tuple(named((1, 2), (4,), (3,))), timeout_ms=20_000)
            )
        assert service.in_flight == 0
    reply = await ask(service, *named((1, 2)))
    assert not reply.failures and service.in_flight == 0 and service.batcher.queued == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_vision_rows_that_are_no_numbers_are_not_kept(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    cache = EmbeddingCache(1 << 20)
    fill = CacheFill(cache)
    for number, value in enumerate((1.0, *BAD.values())):
        # Their sum is more than float16 holds.
        rows = torch.full((3, 4), 6000.0, dtype=dtype)
        rows[1, 2] = value
        fill.put(bytes([number]), rows)
    assert [bytes([number]) in cache for number in range(4)] == [True, False, False, False]
    assert len(caplog.records) == 3
    await fill.close()


class Lost(torch.Tensor):
    """Rows on a device that is gone: they cannot be copied."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


async def test_rows_that_cannot_be_copied_are_said_not_to_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    cache = EmbeddingCache(1 << 20)
    fill = CacheFill(cache)
    fill.put(b"key", torch.ones(3, 4).as_subclass(Lost))
    await fill.close()
    assert b"key" not in cache and complaints == []
    (record,) = caplog.records
    assert "could not be copied" in record.getMessage()


async def test_an_image_that_is_no_numbers_fails_the_inputs_that_have_it(
    make: MakeEmbedder, model: Model
) -> None:
    embedder = make()
    good, bad = picture(1), picture(2)
    embedder.rows.values = {bad.digest: float("nan")}
    items = [
        with_images(model, good, param="input[0]"),
        with_images(model, bad, param="input[1]"),
        text(9, param="input[2]"),
        with_images(model, good, bad, param="input[3]"),
    ]
    for _ in range(2):
        reply = await embedder(*items)
        assert {index: failure.param for index, failure in reply.failures.items()} == {
            1: "input[1]",
            3: "input[3]",
        }
        assert embedder.vectors(reply)[:, 0].tolist() == [embedder.vectors(reply)[0, 0], 9]
    assert len(embedder.cache) == 1
    # The placeholders alone, for whoever asks for the rows themselves.
    placeholders = [
        wire.Item(
            tokens=np.frombuffer(item.tokens, "<i4")[
                model.vision_index(np.frombuffer(item.tokens, "<i4"))
            ].tobytes(),
            images=item.images,
            param=item.param,
        )
        for item in items[:2]
    ]
    reply = await embedder(*placeholders, outputs=("vision",))
    assert list(reply.failures) == [1] and reply.counts == (TILE_ROWS, 0)
