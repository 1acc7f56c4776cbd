"""Engines that raise what torch raises when a device is out of memory, broken or stuck."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.e2e.faults.test_processes import until
from tests.e2e.inputs import cosine
from tests.e2e.service import MODEL, Service, launch
from tests.families.dual_encoder import install, reference
from tests.families.faulty import ASSERTS, HANG, ILLEGAL_ACCESS, MARKS, POISON

pytestmark = pytest.mark.service

SEED = 3
ENGINE = "text: {max_batch_cost: 512, max_queue_cost: 65536, stall_seconds: 3}\nvision: {stall_seconds: 3}\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("engines")
    path = install(folder / "site", "tests.families.faulty")
    checkpoint, marks, config = folder / "checkpoint", folder / "marks", folder / "engine.yaml"
    checkpoint.mkdir()
    marks.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "test_faulty", "seed": SEED}))
    config.write_text(ENGINE)
    environment = {
        "PYTHONPATH": path,
        MARKS: str(marks),
        "TESSERA_EMBED_WORKERS": "2",
        "TESSERA_EMBED_ENGINE_ARGS": str(config),
        # Two lanes: as on a card, two batches may be launched and unfinished.
        "OMP_NUM_THREADS": "2",
    }
    with launch("e_p.sh", checkpoint, folder / "log", workers=3, environment=environment) as running:
        yield running


async def ask(client: httpx.AsyncClient, service: Service, text: str | list[str]) -> httpx.Response:
    body = {"model": MODEL, "input": text}
    return await client.post(f"{service.url}/v1/embeddings", json=body, timeout=60)


def right(response: httpx.Response, *texts: str) -> bool:
    vectors = [np.array(item["embedding"], np.float32) for item in response.json()["data"]]
    return all(
        cosine(vector, reference(SEED, text, ())) > 0.9999
        for vector, text in zip(vectors, texts, strict=True)
    )


async def test_a_batch_that_does_not_fit_is_run_in_smaller_ones(service: Service) -> None:
    # Of one request, so that they wait for the engine together however slowly a machine brings requests.
    texts = [f"text number {number}" for number in range(100)]
    async with httpx.AsyncClient() as client:
        assert right(await ask(client, service, texts), *texts)
    assert "out of memory" in service.log.read_text()


async def test_poison_in_every_batch_fails_its_own_requests(service: Service) -> None:
    texts = [f"text {POISON if number % 5 == 0 else ''} {number}" for number in range(100)]
    async with httpx.AsyncClient() as client:
        answers = await asyncio.gather(*(ask(client, service, text) for text in texts))
    for text, answer in zip(texts, answers, strict=True):
        if POISON in text:
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_failed"
        else:
            assert answer.status_code == 200 and right(answer, text)


@pytest.mark.parametrize(
    ("fault", "said", "count"),
    [
        (ILLEGAL_ACCESS, "the device failed: CUDA error: an illegal memory access", 40),
        (HANG, "an engine has been busy with one batch", 40),
        (ASSERTS[0], "the device failed: CUDA error: device-side assert", 1),
        (ASSERTS[1], "the device failed: CUDA error: device-side assert", 200),
    ],
    ids=["illegal access", "hang", "late, alone", "late, under load"],
)
async def test_a_worker_whose_engine_is_gone_leaves_and_is_replaced(
    service: Service, fault: str, said: str, count: int
) -> None:
    await until(lambda: service.health()["workers"] == {"embed": 2, "encode": 1})
    before, logged = set(service.pids_in_order(4)), len(service.log.read_text())
    texts = [f"a text {number}{fault if number == count // 2 else ''}" for number in range(count)]
    async with httpx.AsyncClient() as client:
        answers = await asyncio.gather(*(ask(client, service, text) for text in texts))
    assert [answer.status_code for answer in answers] == [200] * count
    assert all(right(answer, text) for answer, text in zip(answers, texts, strict=True))

    def replaced() -> bool:
        now = set(service.pids_in_order(4))
        return -1 not in now and now != before

    await until(replaced)
    await until(lambda: service.health()["workers"] == {"embed": 2, "encode": 1})
    (gone,) = before - set(service.pids_in_order(4))
    log = service.log.read_text()[logged:]
    # Not because it seemed to hang: that would take five minutes elsewhere.
    assert f"leaving: {said}" in log and f"(pid {gone}) ended with status 70" in log
