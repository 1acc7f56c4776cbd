"""ColBERT's token vectors and scores over HTTP, by every route that gives them, behind a launch script."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.service import Service, launch
from tests.e2e.service import post as service_post
from tests.references.colbert import ColbertReference

pytestmark = pytest.mark.service

QUERY = "what is the river?"
# Punctuation in a short one, what spells a marker, and what is longer than a document may be.
DOCUMENTS = [
    "the river, under the bridge!",
    "a market by the old temple",
    "été naïve (東京) the the",
    "the river under the bridge by the old temple and a market. " * 20,
]
SIDES = {"query": [QUERY], "document": DOCUMENTS}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("colbert") / "checkpoint"
    write_checkpoint(["--out", str(path), "--family", "bert_colbert"])
    return path


@pytest.fixture(scope="module")
def service(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with launch("agg.sh", path, tmp_path_factory.mktemp("log") / "agg", workers=1) as running:
        yield running


@pytest.fixture(scope="module")
def reference(path: Path) -> ColbertReference:
    return ColbertReference(path)


def post(service: Service, route: str, **body: Any) -> Any:
    answer = service_post(service, route, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(found: list[Any], reference: ColbertReference, side: str) -> None:
    assert len(found) == len(SIDES[side])
    for rows, text in zip(found, SIDES[side], strict=True):
        np.testing.assert_allclose(rows, reference.token_vectors(text, query=side == "query"), atol=1e-5)


def test_the_model_says_what_it_gives(service: Service) -> None:
    (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert card["output"]["kind"] == "tokens"
    assert card["outputs"] == [{"name": "multivector", "kind": "tokens", "width": 32, "most": None}]


# Asked twice: the second answer is the cache's.
@pytest.mark.parametrize("time", ["computed", "cached"])
@pytest.mark.parametrize("side", SIDES)
def test_token_vectors_of_either_side(
    service: Service, reference: ColbertReference, side: str, time: str
) -> None:
    texts, role = SIDES[side], {"input_type": side}
    plain = post(service, "/v1/embeddings", input=texts, **role)
    check([row["embedding"] for row in plain["data"]], reference, side)
    tokens = sum(len(reference.side(text, query=side == "query")[0]) for text in texts)
    assert plain["usage"]["prompt_tokens"] == tokens
    named = post(service, "/v1/embeddings", input=texts, prompt_name=side)
    check([row["embedding"] for row in named["data"]], reference, side)
    jinas = post(service, "/v1/embeddings", input=texts, return_multivector=True, **role)
    check([row["embeddings"] for row in jinas["data"]], reference, side)
    by_name = post(service, "/v1/embeddings", input=texts, output_types=["multivector"], **role)
    check([row.get("multi_vector") or row["embedding"] for row in by_name["data"]], reference, side)
    coded = post(service, "/v1/embeddings", input=texts, encoding_format="base64", **role)
    rows = [
        np.frombuffer(base64.b64decode(row["embedding"]), "<f4").reshape(row["shape"])
        for row in coded["data"]
    ]
    check(rows, reference, side)
    check([row["data"] for row in post(service, "/pooling", input=texts, **role)["data"]], reference, side)
    check(post(service, "/embed_all", inputs=texts, prompt_name=side), reference, side)


def test_a_text_without_a_role_is_a_document(service: Service, reference: ColbertReference) -> None:
    rows = [row["embedding"] for row in post(service, "/v1/embeddings", input=DOCUMENTS)["data"]]
    check(rows, reference, "document")
    check(post(service, "/embed_all", inputs=DOCUMENTS), reference, "document")


@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"])
def test_the_scores_of_every_route(service: Service, reference: ColbertReference, route: str) -> None:
    asked: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
    if route.endswith("score"):
        asked = {"text_1": QUERY, "text_2": DOCUMENTS}
    elif route == "/rerank":
        asked = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
    body = post(service, route, **asked)
    rows = body if isinstance(body, list) else body.get("results") or body["data"]
    key = next(name for name in ("relevance_score", "score") if name in rows[0])
    found = [row[key] for row in sorted(rows, key=lambda row: row["index"])]
    expected = [reference.score(QUERY, text) for text in DOCUMENTS]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_tokens_are_those_that_are_embedded(service: Service, reference: ColbertReference) -> None:
    (pieces,) = post(service, "/tokenize", inputs=[QUERY], prompt_name="query")
    assert [piece["id"] for piece in pieces] == reference.side(QUERY, query=True)[0]
