"""Workers are killed and told to end in the middle of reranking; every answer has the scores of before."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY, RERANK_TINY
from tests.e2e.faults.test_processes import idle, until
from tests.e2e.faults.traffic import PAUSE, Traffic, picture, sending
from tests.e2e.inputs import data_url
from tests.e2e.service import MODEL, Service, launch
from tests.signals import signal_process

pytestmark = [pytest.mark.service, pytest.mark.soak, pytest.mark.timeout(600)]

WORKERS = (0, 1)
QUERIES = ("what is it?", "a picture of some noise", "which of many sentences is meant by this one here?")
# Of a request: with six clients some hundreds of pairs are in each worker at any moment.
DOCUMENTS = 100
# Each picture is one tile; of 512 pixels it took 25 ms of the encoder, not 3.
CHECKPOINTS = {
    "pairs": replace(RERANK_TINY, image_size=256),
    "MaxSim": replace(COLEMBED_TINY, image_size=256),
}
SAME = 1e-3

# As in the deployment of the other tests: what is sent finds room on a slow machine, too.
ENGINE = "vision: {max_queue_seconds: 600}\ntext: {max_queue_seconds: 600}\n"
# While both workers are gone requests wait for one, and a slow machine takes its time to start it.
FRONTEND = "--worker-wait-seconds 180 --request-timeout-seconds 240"


@dataclass(frozen=True, slots=True)
class Known:
    """What the service says of all documents for each query: float64 ``[queries, documents]``."""

    documents: Sequence[Any]
    scores: npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Reranking(Traffic):
    known: Known

    async def send(self, client: httpx.AsyncClient, chance: random.Random, first: int) -> int:
        query = chance.randrange(len(QUERIES))
        chosen = chance.sample(range(len(self.known.documents)), DOCUMENTS)
        answer, moved = await self.ask(
            client, "/v1/rerank", body(query, [self.known.documents[index] for index in chosen]), first
        )
        found = scores_of(answer, DOCUMENTS)
        ranks = [row["relevance_score"] for row in answer["results"]]
        assert ranks == sorted(ranks, reverse=True)
        np.testing.assert_allclose(found, self.known.scores[query, chosen], atol=SAME)
        self.scores += DOCUMENTS
        return moved


def body(query: int, documents: Sequence[Any]) -> dict[str, Any]:
    return {"model": MODEL, "query": QUERIES[query], "documents": documents, "raw_scores": True}


def scores_of(answer: dict[str, Any], count: int) -> npt.NDArray[np.float64]:
    """In the order of the documents, each of which is there once."""
    found = {row["index"]: row["relevance_score"] for row in answer["results"]}
    assert len(answer["results"]) == count and found.keys() == set(range(count))
    return np.array([found[index] for index in range(count)])


def documents() -> list[Any]:
    """Texts of 10 to 100 tokens, and every tenth a picture."""
    return [
        {"image": data_url(picture(seed))}
        if seed % 10 == 0
        else f"sentence number {seed} of those that are ranked " * (1 + seed % 9)
        for seed in range(3 * DOCUMENTS)
    ]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("reranking")
    write_checkpoint(folder / MODEL, CHECKPOINTS[request.param], seed=0)
    (folder / "engine.yaml").write_text(ENGINE)
    environment = {
        "TESSERA_AGG_WORKERS": "2",
        "TESSERA_AGG_ENGINE_ARGS": str(folder / "engine.yaml"),
        "TESSERA_FRONTEND_ARGS": FRONTEND,
    }
    with launch("agg.sh", folder / MODEL, folder / "log", workers=2, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def known(service: Service) -> Known:
    given = documents()
    rows = []
    for query in range(len(QUERIES)):
        answer = httpx.post(f"{service.url}/v1/rerank", json=body(query, given), timeout=120)
        assert answer.status_code == 200, answer.text
        rows.append(scores_of(answer.json(), len(given)))
    scores = np.array(rows)
    # Another document's score, or that for another query, would be seen.
    assert scores.std(axis=1).min() > 100 * SAME
    assert np.abs(np.diff(scores, axis=0)).mean() > 100 * SAME
    return Known(given, scores)


async def busy(service: Service, worker: int) -> int:
    """The process of the worker, once it has pairs of several requests."""
    tokens = 200 * DOCUMENTS / 10
    await until(lambda: service.worker_metric(worker, "tessera_tokens_in_flight") > tokens)
    return service.pids_in_order(3)[1 + worker]


async def back(service: Service, worker: int, old: int) -> None:
    """Another process is in the worker's place, and the frontend has both."""
    await until(lambda: service.pids_in_order(3)[1 + worker] not in (-1, old))
    await until(lambda: service.worker_metric(worker, "tessera_items_total") > 0)
    await until(lambda: service.health()["missing"] == {"embed": 0, "encode": 0})


async def test_scores_are_those_of_before_while_workers_are_killed_and_told_to_end(
    service: Service, known: Known
) -> None:
    one, other = WORKERS
    async with sending(Reranking([service.url], PAUSE, known=known), timeout=300.0) as running:
        await until(lambda: bool(running.answered))
        pids = [await busy(service, worker) for worker in WORKERS]
        first = time.monotonic()
        signal_process(pids[one], signal.SIGKILL)
        await back(service, one, pids[one])
        signal_process(pids[other], signal.SIGTERM)
        await back(service, other, pids[other])
        # Both at once: what the one had goes to the other, which takes no more, or waits for a new one.
        pids = [await busy(service, worker) for worker in WORKERS]
        signal_process(pids[one], signal.SIGKILL)
        signal_process(pids[other], signal.SIGTERM)
        for worker in WORKERS:
            await back(service, worker, pids[worker])
        await until(lambda: len(running.answered) > 20)
    assert running.errors == []
    assert service.frontend_metric("tessera_retries_total") > 0
    assert f"(pid {pids[other]}) ended with status 0" in service.log.read_text()
    running.figures("workers killed and told to end while they rerank", first)
    await idle(service, encode=WORKERS, embed=WORKERS)
