"""Sparse weights as a model's only output, over HTTP: SPLADE behind a launch script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.distilbert import SPLADE_TINY_DISTILLED
from tests.e2e.kserve import Door
from tests.e2e.service import MODEL, Service, launch, post
from tests.references.splade import SpladeReference

pytestmark = pytest.mark.service

TEXTS = ["the river under the bridge", "a market by the old temple", "été naïve 東京 the the"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("splade") / "checkpoint"
    write_checkpoint(path, SPLADE_TINY_DISTILLED, seed=0)
    return path


@pytest.fixture(scope="module")
def service(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with launch("agg.sh", path, tmp_path_factory.mktemp("log") / "agg", workers=1) as running:
        yield running


@pytest.fixture(scope="module")
def reference(path: Path) -> SpladeReference:
    return SpladeReference(path)


def check(found: dict[str, Any], expected: dict[int, float]) -> None:
    assert found["indices"] == list(expected)
    np.testing.assert_allclose(found["values"], list(expected.values()), atol=1e-5)


# Asked twice: the second answer is the cache's.
@pytest.mark.parametrize("time", ["computed", "cached"])
@pytest.mark.parametrize("asked", [{}, {"output_types": ["sparse"]}, {"encoding_format": "base64"}])
def test_weights_without_being_named(
    service: Service, reference: SpladeReference, asked: dict[str, Any], time: str
) -> None:
    answer = post(service, input=TEXTS, **asked).json()
    for text, row in zip(TEXTS, answer["data"], strict=True):
        assert row["embedding"] == ("" if "encoding_format" in asked else [])
        check(row["sparse_embedding"], reference.weights(text))
        assert "tokens" not in row["sparse_embedding"]
    assert answer["usage"]["prompt_tokens"] == sum(len(reference.tokens(text)) for text in TEXTS)


def test_the_largest_weights_with_their_tokens(service: Service, reference: SpladeReference) -> None:
    answer = post(service, input=TEXTS, max_active_dims=3, return_tokens=True).json()
    for text, row in zip(TEXTS, answer["data"], strict=True):
        largest = sorted(reference.weights(text).items(), key=lambda pair: -pair[1])[:3]
        check(row["sparse_embedding"], dict(sorted(largest)))
        assert row["sparse_embedding"]["tokens"] == [
            reference.tokenizer.id_to_token(token) for token, _ in sorted(largest)
        ]


def test_openais_client_bears_it(service: Service, reference: SpladeReference) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for text, row in zip(TEXTS, client.embeddings.create(model=MODEL, input=TEXTS).data, strict=True):
            found: Any = row
            assert found.embedding == []
            check(found.sparse_embedding, reference.weights(text))


def test_text_embeddings_inferences_route(service: Service, reference: SpladeReference) -> None:
    answer = httpx.post(f"{service.url}/embed_sparse", json={"inputs": TEXTS}, timeout=60)
    for text, pairs in zip(TEXTS, answer.json(), strict=True):
        found = {key: [pair[of] for pair in pairs] for key, of in (("indices", "index"), ("values", "value"))}
        check(found, reference.weights(text))
    assert httpx.get(f"{service.url}/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}


def test_what_it_is_called(service: Service) -> None:
    (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert card["outputs"] == [{"name": "sparse", "kind": "sparse", "width": 1, "most": 2000}]
    assert (card["task"], card["output"]["kind"], card["pooling"]) == ("sparse_embed", "sparse", None)
    assert sorted(card["routes"]) == ["/embed_sparse", "/embeddings", "/v1/embeddings"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/embed", {"inputs": "a"}),
        ("/embed_all", {"inputs": "a"}),
        ("/pooling", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "text", "text": "a"}]}]}),
    ],
)
def test_routes_of_vectors_say_what_the_model_has(service: Service, route: str, body: dict[str, Any]) -> None:
    refused = post(service, route, **body)
    assert refused.status_code == 404
    assert f"{route} answers models whose output is" in refused.text
    assert "has sparse as its output" in refused.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_types": ["dense"]}, "output_types"),
        ({"return_sparse": True}, "output_types"),
        ({"dimensions": 1}, "dimensions"),
        ({"embed_dtype": "int8"}, "embed_dtype"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"return_multivector": True}, "return_multivector"),
        ({"max_active_dims": 0}, "max_active_dims"),
    ],
)
def test_refusals_name_the_field(service: Service, body: dict[str, Any], param: str) -> None:
    refused = post(service, input="a", **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_inputs_that_fail_stand_alone(service: Service, reference: SpladeReference) -> None:
    empty, good, long = post(service, input=["", TEXTS[0], "river " * 2000], partial=True).json()["data"]
    assert (empty["embedding"], empty["error"]["param"]) == (None, "input[0]")
    assert (long["embedding"], long["error"]["param"]) == (None, "input[2]")
    check(good["sparse_embedding"], reference.weights(TEXTS[0]))


def test_qdrant_finds_what_is_the_largest_dot_product(service: Service, reference: SpladeReference) -> None:
    models = pytest.importorskip("qdrant_client.models")
    from qdrant_client import QdrantClient

    def vectors(texts: list[str]) -> list[Any]:
        rows = post(service, input=texts).json()["data"]
        return [models.SparseVector(**row["sparse_embedding"]) for row in rows]

    client = QdrantClient(":memory:")
    client.create_collection(
        "texts", vectors_config={}, sparse_vectors_config={"sparse": models.SparseVectorParams()}
    )
    stored = zip(vectors(TEXTS), TEXTS, strict=True)
    client.upsert(
        "texts",
        [
            models.PointStruct(id=place, vector={"sparse": vector}, payload={"text": text})
            for place, (vector, text) in enumerate(stored)
        ],
    )
    rows = np.stack([reference.row(reference.tokens(text)) for text in TEXTS])
    asked = "the temple by the bridge"
    scores = rows @ reference.row(reference.tokens(asked))
    (query,) = vectors([asked])
    found = client.query_points("texts", query=query, using="sparse", limit=3).points
    assert [point.id for point in found] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([point.score for point in found], np.sort(scores)[::-1], rtol=1e-4)
    client.close()


@pytest.mark.kserve
def test_kserve_gives_the_tensors_of_weights(service: Service, reference: SpladeReference) -> None:
    kserve = Door(http=service.url.removeprefix("http://"), grpc="").client("http")
    listed = kserve.client.get_model_metadata("router")["outputs"]
    assert [each["name"] for each in listed] == ["sparse_indices", "sparse_values"]
    found = kserve.infer(MODEL, {"text": np.array([[text] for text in TEXTS], object)})
    indices, values = found.as_numpy("sparse_indices"), found.as_numpy("sparse_values")
    for row, text in enumerate(TEXTS):
        held = indices[row] >= 0
        check({"indices": indices[row][held].tolist(), "values": values[row][held]}, reference.weights(text))
        assert not values[row][~held].any()
    kserve.client.close()
