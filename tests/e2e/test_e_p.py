"""Two encode and two embed workers: routing, batching, what fails alone. Faults are in tests/e2e/faults."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from safetensors.torch import save

from tests.e2e.inputs import cosine, image_input, picture
from tests.e2e.service import MODEL, Service, launch
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service

ENCODE, EMBED = (0, 1), (2, 3)


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("service") / "log"
    workers = {"TESSERA_ENCODE_WORKERS": "2", "TESSERA_EMBED_WORKERS": "2"}
    with launch("e_p.sh", checkpoint, log, workers=4, environment=workers) as running:
        yield running


@asynccontextmanager
async def openai(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_rows_of_the_clients_own_take_the_same_way(
    service: Service, reference: Reference, photos: dict[str, bytes]
) -> None:
    rows = reference.vision_rows(reference.tiles(photos["flower"]))
    tensor = base64.b64encode(save({"rows": rows})).decode()
    inputs = [
        [{"type": "image_embeds", "image_embeds": tensor}, {"type": "text", "text": text}]
        for text in ("one", "two", "three", "four")
    ]
    images = sum(service.worker_metric(worker, "tessera_items_total", stage="encode") for worker in ENCODE)
    read = sum(service.worker_metric(w, "tessera_transfers_total", outcome="ok") for w in EMBED)
    answer = httpx.post(f"{service.url}/v1/embeddings", json={"input": inputs}, timeout=60).json()
    for row, text in zip(answer["data"], ("one", "two", "three", "four"), strict=True):
        expected = reference.vector(text, [photos["flower"]], "passage")
        assert cosine(np.array(row["embedding"], np.float32), expected) >= 0.9999
    assert images == sum(service.worker_metric(w, "tessera_items_total", stage="encode") for w in ENCODE)
    # Once for all inputs that one worker gets.
    now = sum(service.worker_metric(w, "tessera_transfers_total", outcome="ok") for w in EMBED)
    assert 1 <= now - read <= len(EMBED)
    assert service.frontend_metric("tessera_lent_bytes") == 0


async def test_text_never_reaches_an_encode_worker(service: Service) -> None:
    before = [service.worker_metric(worker, "tessera_items_total", stage="encode") for worker in ENCODE]
    async with openai(service) as client:
        await client.embeddings.create(model=MODEL, input=[f"text {index}" for index in range(50)])
    after = [service.worker_metric(worker, "tessera_items_total", stage="encode") for worker in ENCODE]
    assert before == after


async def test_concurrent_requests_share_batches(service: Service) -> None:
    def totals() -> dict[str, tuple[float, float]]:
        return {
            stage: (
                sum(service.worker_metric(w, "tessera_batch_entries_count", stage=stage) for w in workers),
                sum(service.worker_metric(w, "tessera_batch_entries_sum", stage=stage) for w in workers),
            )
            for stage, workers in (("text", EMBED), ("vision", ENCODE))
        }

    before = totals()
    async with openai(service) as client:

        async def one(index: int) -> None:
            value = f"text {index}" if index % 2 else [image_input(picture(1000 + index))]
            await client.embeddings.create(model=MODEL, input=value)

        # A few times if a slow machine brings them one by one.
        for first in range(0, 5 * 64, 64):
            await asyncio.gather(*(one(index) for index in range(first, first + 64)))
            means = {
                stage: (entries - before[stage][1]) / (count - before[stage][0])
                for stage, (count, entries) in totals().items()
            }
            if min(means.values()) > 1.0:
                break
    print("mean batches:", means)
    assert min(means.values()) > 1.0, means


async def test_one_image_in_many_requests_is_encoded_once(service: Service) -> None:
    before = sum(service.worker_metric(worker, "tessera_items_total", stage="encode") for worker in ENCODE)
    value = [image_input(picture(1))]
    async with openai(service) as client:
        answers = await asyncio.gather(
            *(client.embeddings.create(model=MODEL, input=value) for _ in range(16))
        )
    after = sum(service.worker_metric(worker, "tessera_items_total", stage="encode") for worker in ENCODE)
    assert after - before == 1
    vectors = np.array([answer.data[0].embedding for answer in answers])
    assert (vectors @ vectors[0] > 0.9999).all()
