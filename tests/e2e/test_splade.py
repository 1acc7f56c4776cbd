"""Sparse weights as a model's only output, over HTTP: SPLADE behind a launch script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.distilbert import SPLADE_TINY_DISTILLED
from tests.e2e.service import Service, launch, post
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


def test_what_it_is_called(service: Service) -> None:
    (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert card["outputs"] == [{"name": "sparse", "kind": "sparse", "width": 1, "most": 2000}]
    assert httpx.get(f"{service.url}/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
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
