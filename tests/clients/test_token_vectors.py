"""Vectors of tokens through a running service: what clients and vector stores make of them.

The examples of ``docs/api.md`` run as they stand.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.e2e.service import MODEL, Service, launch
from tests.families.dual_encoder import install
from tests.families.token_rows import make_checkpoint, reference

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("token-vectors")]

SEED = 5
QUERY = "two of them"
TEXTS = ["a yellow heart", "two cats", "the sum of the first ten primes"]
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("token-vectors")
    path = install(folder / "site", "tests.families.token_rows")
    checkpoint = make_checkpoint(folder / "checkpoint", SEED)
    environment = {"PYTHONPATH": path, "TESSERA_FRONTEND_ARGS": "--max-response-mb 1 --max-inputs 600"}
    with launch("agg.sh", checkpoint, folder / "log", workers=1, environment=environment) as running:
        yield running


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


def same(found: object, text: str) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), reference(SEED, text), atol=1e-5)


def max_sims(query: Any, documents: Sequence[Any]) -> list[float]:
    return [float((np.array(query) @ np.array(rows).T).max(axis=1).sum()) for rows in documents]


def test_every_client_gets_the_matrices_in_its_own_form(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": TEXTS}
    plain = http.post("/v1/embeddings", json=body).json()["data"]
    jina = http.post("/v1/embeddings", json={**body, "return_multivector": True}).json()["data"]
    vllm = http.post("/pooling", json={**body, "task": "token_embed"}).json()["data"]
    tei = http.post("/embed_all", json={"inputs": TEXTS}).json()
    found = zip(plain, jina, vllm, tei, TEXTS, strict=True)
    for embedding, embeddings, pooled, rows, text in found:
        for matrix in (embedding["embedding"], embeddings["embeddings"], pooled["data"], rows):
            same(matrix, text)


def test_the_openai_package_finds_the_shape_beside_its_flat_list(service: Service) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        default = client.embeddings.create(model=MODEL, input=TEXTS)
        floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    for coded, listed, text in zip(default.data, floats.data, TEXTS, strict=True):
        same(np.reshape(coded.embedding, coded.shape), text)  # type: ignore[attr-defined]
        same(listed.embedding, text)


def test_raw_bytes_and_other_element_types(http: httpx.Client) -> None:
    for route, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        body = {"input": TEXTS, "encoding_format": "base64", "embed_dtype": "float16"}
        for row, text in zip(http.post(route, json=body).json()["data"], TEXTS, strict=True):
            half = np.frombuffer(base64.b64decode(row[key]), "<f2").reshape(row["shape"])
            np.testing.assert_allclose(half, reference(SEED, text), atol=1e-3)
        raw = http.post(route, json={"input": TEXTS, "encoding_format": "bytes_only"})
        assert "metadata" not in raw.headers
        same(np.frombuffer(raw.content, "<f4").reshape(-1, 48), "".join(TEXTS))


def test_what_would_go_over_the_limit_is_refused_before_any_work(http: httpx.Client) -> None:
    texts = ["x" * 500] * 100
    # 500 rows of 48 numbers are 96,000 bytes in float32, and 385,500 as JSON.
    for form, first in (("float", 2), ("bytes", 10), ("base64", 8)):
        answer = http.post("/v1/embeddings", json={"input": texts, "encoding_format": form})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            413,
            "response_too_large",
            f"input[{first}]",
        )
        good = http.post("/v1/embeddings", json={"input": texts[:first], "encoding_format": form})
        assert good.status_code == 200
    # The rows come as float32, whatever they become.
    answer = http.post("/pooling", json={"input": texts, "encoding_format": "bytes", "embed_dtype": "int8"})
    assert answer.json()["error"]["param"] == "input[10]"


def test_routes_that_give_one_vector_say_why_they_do_not(http: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v2/embed": {"model": MODEL, "input_type": "search_query", "texts": ["a"]},
        "/v1/multimodalembeddings": {
            "model": MODEL,
            "inputs": [{"content": [{"type": "text", "text": "a"}]}],
        },
        "/embed": {"inputs": "a"},
        "/v1/ranking": {"query": {"text": "a"}, "passages": [{"text": "b"}]},
    }
    for route, body in bodies.items():
        answer = http.post(route, json=body)
        assert answer.status_code == 404, route
        assert "tokens" in answer.text and route in answer.text
    error = http.post("/pooling", json={"input": "a", "task": "embed"}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_input", "task")


def example(library: str) -> str:
    (found,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        if f"import {library}" in block or f"from {library}" in block
    )
    return str(found)


def test_the_examples_of_stores_rank_as_max_sim(service: Service) -> None:
    names: dict[str, Any] = {"MODEL": MODEL}
    code = example("qdrant_client").replace("http://127.0.0.1:8000", service.url)
    exec(compile(code, "docs/api.md", "exec"), names)
    names["service"].close()
    expected = max_sims(names["query"], names["found"])
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [point.id for point in names["best"]] == order
    np.testing.assert_allclose([point.score for point in names["best"]], sorted(expected)[::-1], atol=1e-4)
    exec(compile(example("lancedb"), "docs/api.md", "exec"), names)
    assert [row["text"] for row in names["nearest"]] == [names["pages"][index] for index in order]


def test_documents_that_come_back_count_as_the_answers_bytes(http: httpx.Client) -> None:
    document = {"text": TEXTS[0], "source": "x" * 700_000}
    body = {"query": QUERY, "documents": [document]}
    asked = body | {"return_documents": True}
    assert http.post("/v1/rerank", json=body).status_code == 200
    assert http.post("/v2/rerank", json=asked).json()["results"][0]["document"] == document
    # There they stand twice.
    twice = http.post("/v1/rerank", json=asked)
    assert (twice.status_code, twice.json()["error"]["code"]) == (413, "response_too_large")
