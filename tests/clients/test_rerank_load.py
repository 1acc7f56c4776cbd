"""What requests cost a running reranker: batches are shared, images made once, and work dropped."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from tests.clients.conftest import ClosedService
from tests.e2e.faults.traffic import picture
from tests.e2e.inputs import data_url
from tests.proc import command_line
from tests.signals import freeze
from tests.waiting import until

pytestmark = pytest.mark.service


def calling(reranker: ClosedService) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=reranker.url, headers={"Authorization": f"Bearer {reranker.key}"}, timeout=60
    )


def worker(reranker: ClosedService, name: str, **labels: str) -> float:
    return reranker.running.worker_metric(0, name, **labels)


async def test_pairs_of_many_requests_share_batches(reranker: ClosedService) -> None:
    def ran() -> tuple[float, float]:
        entries, batches = (f"tessera_batch_entries_{what}" for what in ("sum", "count"))
        return worker(reranker, entries, stage="text"), worker(reranker, batches, stage="text")

    def arrived() -> bool:
        return "tessera_requests_in_flight 40.0" in http.get("/metrics").text

    entries, batches = ran()
    (frozen,) = (pid for pid in reranker.running.pids() if "tessera.worker" in command_line(pid))
    async with calling(reranker) as client:
        bodies = ({"query": "a flower", "documents": [f"text {number}"]} for number in range(40))
        # A slow client would send each one when the one before it has been answered.
        freeze(frozen)
        try:
            calls = [asyncio.ensure_future(client.post("/v1/rerank", json=body)) for body in bodies]
            with reranker.http() as http:
                await until(arrived)
        finally:
            os.kill(frozen, signal.SIGCONT)
        answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200}
    more_entries, more_batches = ran()
    assert more_entries - entries == 40 > more_batches - batches


async def test_the_image_of_a_query_is_made_once(reranker: ClosedService) -> None:
    images = worker(reranker, "tessera_batch_entries_sum", stage="vision")
    query = {"content": [{"type": "image_url", "image_url": {"url": data_url(picture(7))}}]}
    body = {"queries": query, "documents": [f"text {number}" for number in range(30)]}
    async with calling(reranker) as client:
        answer = await client.post("/v1/score", json=body)
    assert answer.status_code == 200 and len(answer.json()["data"]) == 30, answer.text
    assert worker(reranker, "tessera_batch_entries_sum", stage="vision") - images == 1


async def test_pairs_that_have_not_begun_are_dropped_when_their_client_hangs_up(
    reranker: ClosedService,
) -> None:
    def cancelled() -> float:
        return worker(reranker, "tessera_items_total", stage="embed", outcome="cancelled")

    before, ran = cancelled(), worker(reranker, "tessera_batch_entries_sum", stage="text")
    body = {"query": "a flower", "documents": [f"{number} " + "words " * 300 for number in range(1000)]}
    async with calling(reranker) as client:
        call = asyncio.ensure_future(client.post("/v1/rerank", json=body))
        await until(lambda: call.done() or worker(reranker, "tessera_queued", stage="text") > 10_000)
        assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await until(lambda: cancelled() > before)
    for name in ("tessera_queued", "tessera_tokens_in_flight"):
        await until(lambda n=name: not worker(reranker, n))  # type: ignore[misc]
    assert worker(reranker, "tessera_batch_entries_sum", stage="text") - ran < 1000
    with reranker.http() as http:

        def idle() -> bool:
            lines = http.get("/metrics").text.splitlines()
            names = ("tessera_admitted_tokens", "tessera_requests_in_flight")
            found = [line for line in lines if line.startswith(names)]
            return len(found) == len(names) and all(line.endswith(" 0.0") for line in found)

        await until(idle)
