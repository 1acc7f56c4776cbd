"""Clients that hang up at every stage, send poison, or take more than their share."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.conftest import EMBED, ENCODE, Deployment
from tests.e2e.faults.test_processes import WAIT, until, whole
from tests.e2e.faults.traffic import PAUSE, Known, picture, traffic
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, launch

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("faults")]


def request(value: object) -> bytes:
    body = json.dumps({"model": MODEL, "input": value}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def hang_up(url: str, payload: bytes, patience: float) -> None:
    """Send it, wait so many seconds, and close the connection without reading."""
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(payload)
    await asyncio.sleep(patience)
    writer.transport.abort()


async def test_clients_that_hang_up_at_every_stage_leave_nothing(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    service, url = deployment.service, deployment.urls[0]
    before = service.frontend_metric("tessera_disconnects_total")

    def dropped() -> float:
        return sum(service.worker_metric(worker, "tessera_dropped_total") for worker in (*ENCODE, *EMBED))

    unseen = dropped()
    # Four of them at once are well below what one of several frontends admits.
    texts = request([f"{index} " + "many words " * 200 for index in range(8)])
    stages = (b"", texts[:40], texts[: len(texts) // 2], texts)
    seeds = itertools.count(9000)

    def seen() -> bool:
        return service.frontend_metric("tessera_disconnects_total") > before and dropped() > unseen

    async with (
        traffic(deployment.urls, known, concurrency=3, pause=PAUSE) as running,
        httpx.AsyncClient(timeout=60) as client,
    ):
        deadline = time.monotonic() + WAIT
        # A request is queued for a part of its time only, and how long differs from machine to machine: round
        # after round is sent until some were dropped there.
        while True:
            new = [parts(None, picture(next(seeds), 200)) for _ in range(24)]
            started = time.monotonic()
            answer = await client.post(f"{url}/v1/embeddings", json={"model": MODEL, "input": new})
            assert answer.status_code == 200, answer.text
            takes = time.monotonic() - started
            for _ in range(2):
                images = request([parts(None, picture(next(seeds), 200)) for _ in range(24)])
                await asyncio.gather(
                    *(hang_up(url, stage, 0.05) for stage in stages),
                    *(
                        hang_up(url, payload, share * takes)
                        for payload in (texts, images)
                        for share in (0.3, 0.6, 0.9)
                    ),
                )
            if seen() or time.monotonic() > deadline:
                break
    assert running.errors == []
    # Much of it had been queued, and no engine saw it.
    await until(seen)
    await whole(deployment)


async def test_poison_in_every_batch_fails_its_own_requests(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    async with (
        traffic(deployment.urls, known, pause=PAUSE) as running,
        httpx.AsyncClient(timeout=60) as client,
    ):
        # The header is right, so that only the encode worker finds out.
        broken = [picture(12_000 + number, 200)[:4000] for number in range(40)]
        answers = await asyncio.gather(
            *(
                client.post(
                    f"{deployment.urls[number % 2]}/v1/embeddings",
                    json={"model": MODEL, "input": ["beside it", parts("poison", data)]},
                )
                for number, data in enumerate(broken)
            )
        )
    assert running.errors == [] and running.answered
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("input[1]")
    await whole(deployment)


async def test_a_key_that_floods_leaves_room_for_another(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("text: {max_batch_cost: 2048, max_queue_cost: 32768, max_queue_seconds: 600}\n")
    keys = tmp_path / "keys"
    keys.write_text("greedy-key-1 greedy\nmodest-key-1 modest\n")
    environment = {"TESSERA_AGG_ENGINE_ARGS": str(config), "TESSERA_FRONTEND_ARGS": f"--api-keys-file {keys}"}
    with launch("agg.sh", checkpoint, tmp_path / "log", workers=1, environment=environment) as service:
        stop = asyncio.Event()
        body = {"model": MODEL, "input": [f"{index} " + "some words " * 60 for index in range(16)]}
        statuses: dict[str, list[int]] = {"greedy": [], "modest": []}

        async def ask(client: httpx.AsyncClient, name: str) -> None:
            while not stop.is_set():
                headers = {"authorization": f"Bearer {name}-key-1"}
                answer = await client.post(f"{service.url}/v1/embeddings", json=body, headers=headers)
                statuses[name].append(answer.status_code)
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    await asyncio.sleep(0.02)

        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            tasks = [asyncio.create_task(ask(client, "greedy")) for _ in range(60)]
            await until(lambda: 429 in statuses["greedy"])
            tasks += [asyncio.create_task(ask(client, "modest")) for _ in range(2)]
            await asyncio.sleep(3.0)
            stop.set()
            await asyncio.gather(*tasks)
    print({name: (len(found), found.count(429)) for name, found in statuses.items()})
    assert set(statuses["greedy"]) == {200, 429}
    # Whoever asks for little is never refused, however much somebody else asks for.
    assert statuses["modest"] and set(statuses["modest"]) == {200}
