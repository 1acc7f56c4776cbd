"""The published all-MiniLM-L6-v2 and random cross-encoders, each behind a launch script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests import minilm
from tests.clients import encoders
from tests.clients.environment import answers_of
from tests.e2e.service import MODEL, Service, launch
from tests.models.running import Given, Pair, cosines
from tests.references.encoder import CrossReference, EncoderReference

pytestmark = pytest.mark.service


@dataclass(frozen=True, slots=True)
class Opened:
    """Services that need no key, by their URLs."""

    url: str
    key: str = "none"


QUERY, DOCUMENTS = "river", ["temple", "the river under the bridge", "été naïve 東京", "a market"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("log") / "agg"
    with launch("agg.sh", minilm.directory(), log, workers=1) as running:
        yield running


def test_minilm_gives_the_vectors_of_its_authors_library(service: Service) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=minilm.SENTENCES)
    first, second = (np.array(row.embedding) for row in answer.data)
    np.testing.assert_allclose(first[:6], minilm.BEGINNING, atol=1e-6)
    assert first @ second == pytest.approx(minilm.PRODUCT, abs=1e-6)
    assert answer.usage.prompt_tokens == 7 + 6


def test_minilm_gives_the_vectors_of_transformers(service: Service) -> None:
    texts = [*DOCUMENTS, "the river under the bridge by the old temple " * 20]
    reference = EncoderReference(minilm.directory())
    expected = [reference.answer(Given(parts=(text,))) for text in texts]
    answer = httpx.post(f"{service.url}/v1/embeddings", json={"input": texts}, timeout=60).json()
    found = np.array([row["embedding"] for row in answer["data"]])
    assert cosines(found, np.stack(expected)).min() >= 0.99999


def test_minilm_refuses_what_is_longer_than_it_declares(service: Service) -> None:
    body = {"input": "river " * 300}
    refused = httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=60)
    assert refused.status_code == 400 and "over the limit of 256" in refused.text
    cut = httpx.post(f"{service.url}/v1/embeddings", json=body | {"truncate": "END"}, timeout=60).json()
    assert cut["usage"]["prompt_tokens"] == 256


Scoring = tuple[str, np.ndarray, Service]
"""The family, the logits of its pairs, and its service."""


@pytest.fixture(scope="module", params=["bert_rerank", "xlm_roberta_rerank"])
def scoring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scoring]:
    folder = tmp_path_factory.mktemp(request.param)
    path: Path = folder / "model"
    write_checkpoint(["--out", str(path), "--family", request.param])
    reference = CrossReference(path)
    pairs = [Pair(query=Given(parts=(QUERY,)), document=Given(parts=(text,))) for text in DOCUMENTS]
    logits = np.array([reference.answer(pair)[0] for pair in pairs])
    with launch("agg.sh", path, folder / "log", workers=1) as running:
        yield request.param, logits, running


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"])
def test_the_scores_of_every_route(scoring: Scoring, route: str, raw: bool) -> None:
    """Probabilities, but logits where the checkpoint declares Identity; what is asked for wins."""
    family, logits, service = scoring
    identity = raw or family == "bert_rerank"
    expected = logits if identity else 1 / (1 + np.exp(-logits))
    asked: dict[str, object] = {"query": QUERY, "documents": DOCUMENTS}
    if route.endswith("score"):
        asked = {"text_1": QUERY, "text_2": DOCUMENTS}
    elif route == "/rerank":
        asked = {"query": QUERY, "texts": DOCUMENTS}
    if raw:
        asked["raw_scores"] = True
    answer = httpx.post(f"{service.url}{route}", json={"model": MODEL, **asked}, timeout=60)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    rows = body if isinstance(body, list) else body.get("results") or body["data"]
    key = next(name for name in ("relevance_score", "score") if name in rows[0])
    found = np.array([row[key] for row in sorted(rows, key=lambda row: row["index"])])
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.installs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scoring", ["xlm_roberta_rerank"], indirect=True)
def test_clients_of_other_servers_get_what_transformers_gives(service: Service, scoring: Scoring) -> None:
    """The vectors of MiniLM, and a cross-encoder's scores."""
    reference = EncoderReference(minilm.directory())
    vectors = np.stack([reference.answer(Given(parts=(text,))) for text in (QUERY, *DOCUMENTS)])
    _, logits, scorer = scoring
    scores = sorted(enumerate(1 / (1 + np.exp(-logits))), key=lambda row: -row[1])[:3]
    opened = Opened(f"{service.url} {scorer.url}")
    for client, answer in answers_of("frameworks", encoders, opened, MODEL, QUERY, DOCUMENTS).items():
        assert not isinstance(answer, str), (client, answer)
        if client in encoders.VECTORS:
            query, texts = answer
            np.testing.assert_allclose([query, *texts], vectors, atol=1e-5, err_msg=client)
        else:
            # LangChain asks for three.
            assert [index for index, _ in answer[:3]] == [index for index, _ in scores], client
            assert [score for _, score in answer[:3]] == pytest.approx(
                [score for _, score in scores], abs=1e-4
            )
