"""A frontend without workers, as a process: what it says of a model, and what it refuses before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import TINY as ENCODER
from tests.e2e.service import MODEL
from tests.families.dual_encoder import HIDDEN, install
from tests.frontend.alone import frontend

pytestmark = pytest.mark.service

UNREACHABLE = "http://127.0.0.1:1/a.png"


@pytest.fixture(scope="module")
def vectors(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model of vectors of 128 values; an answer may have 64 KiB."""
    folder = tmp_path_factory.mktemp("vectors")
    with frontend(
        checkpoint, folder, "--max-response-mb", "0.0625", "--dimensions-allowed", "100-104"
    ) as client:
        yield client


@pytest.fixture(scope="module")
def token_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model of text alone that gives a row for each token."""
    folder = tmp_path_factory.mktemp("token_rows")
    path = install(folder / "site", "tests.families.token_rows")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "test_token_rows", "seed": 1}))
    with frontend(checkpoint, folder, environment={"PYTHONPATH": path}) as client:
        yield client


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--dimensions-allowed", "64-128, 256"), "256 goes beyond the model's own width, 128"),
        (("--max-embed-tokens", "2000"), "a vector of 'cls' is not the mean of its tokens' states"),
    ],
)
def test_what_a_model_cannot_do_ends_the_frontend_at_its_start(
    tmp_path: Path, flags: tuple[str, str], said: str
) -> None:
    write_checkpoint(tmp_path / "cls", replace(ENCODER, pooling="cls_token"))
    command = [sys.executable, "-m", "tessera.frontend", "--model-path", str(tmp_path / "cls"), *flags]
    environment = os.environ | {"DYN_FILE_KV": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1
    assert f"{' '.join(flags)}: {said}" in ended.stderr.splitlines()[-1]


def test_a_model_says_what_it_is(vectors: httpx.Client, token_rows: httpx.Client) -> None:
    said = {
        vectors: {
            "family": "llama_nemotron_vl",
            "output": {
                "kind": "vector",
                "width": 128,
                "dimensions": [[32, 32], [64, 64], [100, 104], [128, 128]],
            },
            "images": True,
            "task": "embed",
            "pooling": ["mean"],
            "pooling_assumed": False,
            "assumed": [],
        },
        token_rows: {
            "family": "token_rows",
            "output": {"kind": "tokens", "width": HIDDEN, "dimensions": [[HIDDEN, HIDDEN]]},
            "images": False,
            "task": "token_embed",
        },
    }
    for client, expected in said.items():
        card = client.get("/v1/models").json()["data"][0]
        status = client.get("/status").json()
        assert client.get(f"/v1/models/{MODEL}").json() == card
        for found in (card, status):
            assert {key: found[key] for key in expected} == expected
        health = client.get("/health")
        assert (health.status_code, health.json()["images"]) == (503, False)


def test_the_routes_that_a_model_lists_are_those_that_answer_it(
    vectors: httpx.Client, token_rows: httpx.Client
) -> None:
    asked = 0
    for client in (vectors, token_rows):
        document = client.get("/openapi.json").json()
        listed = client.get("/v1/models").json()["data"][0]["routes"]
        for path, methods in document["paths"].items():
            if "post" in methods and path != "/tokenize":
                assert methods["post"]["x-output-kinds"], path
                path = path.replace("{", "").replace("}", "")
                # An empty body is refused behind that, if at all.
                answer = client.post(path, json={})
                assert (path in listed) == (answer.status_code != 404), (path, answer.text)
                asked += 1
        assert "For models whose output is tokens.</p>" in client.get("/docs").text
    assert asked >= 12
    assert {"/v1/embeddings", "/v2/embed", "/embed", "/pooling", "/", "/invocations"} <= set(
        vectors.get("/v1/models").json()["data"][0]["routes"]
    )


def test_teis_clients_are_told_what_is_served(vectors: httpx.Client, token_rows: httpx.Client) -> None:
    info = vectors.get("/info").json()
    assert info["model_id"] == info["served_model_name"] == MODEL
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_client_batch_size"], info["model_dtype"]) == (8192, None)
    assert info["max_input_length"] == vectors.get("/v1/models").json()["data"][0]["max_model_len"]
    assert token_rows.get("/info").json()["model_type"] == {"embedding": {"pooling": "none"}}


SIXTY: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a"] * 60},
    "/v2/embed": {"texts": ["a"] * 60},
    "/v1/multimodalembeddings": {"inputs": [{"content": [{"type": "text", "text": "a"}]}] * 60},
    "/embed": {"inputs": ["a"] * 60},
}


@pytest.mark.parametrize("path", SIXTY)
def test_an_answer_that_would_be_too_large_is_refused_before_any_work(
    vectors: httpx.Client, path: str
) -> None:
    """Sixty rows of 128 numbers may take 128,640 bytes in JSON; what goes on finds no worker: 503."""
    answer = vectors.post(path, json=SIXTY[path])
    assert answer.status_code == 413
    assert "over the limit of 65536 of an answer" in answer.text
    few = {key: value[:20] for key, value in SIXTY[path].items()}
    assert vectors.post(path, json=few).status_code == 503


def test_what_an_answer_takes_follows_its_form(vectors: httpx.Client) -> None:
    many = {"input": ["a"] * 60}
    refused = vectors.post("/v1/embeddings", json=many)
    assert (refused.json()["error"]["code"], refused.headers.get("retry-after")) == (
        "response_too_large",
        None,
    )
    for form in (
        {"encoding_format": "base64"},
        {"encoding_format": "bytes"},
        {"dimensions": 32},
        {"embed_dtype": "ubinary"},
    ):
        assert vectors.post("/v1/embeddings", json=many | form).status_code == 503, form
    # Rows come as 512 bytes of float32, whatever they are written as.
    packed = {"input": ["a"] * 140, "embed_dtype": "ubinary", "encoding_format": "bytes"}
    assert vectors.post("/v1/embeddings", json=packed).status_code == 413
    three = {"texts": ["a"] * 20, "embedding_types": ["float", "int8", "base64"]}
    assert vectors.post("/v2/embed", json=three).status_code == 413
    # Nothing was fetched for it.
    unreachable = {"input": [{"image": UNREACHABLE}] * 60}
    assert vectors.post("/v1/embeddings", json=unreachable).status_code == 413
    assert "tessera_admitted_response_bytes 0.0" in vectors.get("/metrics").text


def test_routes_of_vectors_answer_no_other_model(vectors: httpx.Client, token_rows: httpx.Client) -> None:
    for path, body in SIXTY.items():
        if path != "/v1/embeddings":
            answer = token_rows.post(path, json=body)
            assert answer.status_code == 404, answer.text
            assert path in answer.text and "tokens as its output" in answer.text
    said = f"/embed_all answers models whose output is tokens, and {MODEL!r} has vector as its output"
    answer = vectors.post("/embed_all", json={"inputs": "a"})
    assert answer.json() == {"error": said, "error_type": "Validation"}
    # Whoever serves token vectors finds no worker.
    for path in ("/v1/embeddings", "/pooling"):
        assert token_rows.post(path, json={"input": "a"}).status_code == 503
    assert vectors.post("/pooling", json={"input": "a"}).status_code == 503
    assert token_rows.post("/tokenize", json={"input": "ab"}).json()["tokens"] == [97, 98]


def test_an_answer_of_scores_is_too_large_from_the_input_that_is_said(vectors: httpx.Client) -> None:
    """128 vectors of 128 values may come; what goes on finds no worker: 503."""
    body = {"queries": "a", "documents": ["b"] * 127}
    assert vectors.post("/score", json=body).status_code == 503
    refused = vectors.post("/score", json=body | {"documents": ["b"] * 130})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (413, "response_too_large")
    assert error["param"] == "documents[127]" and "fewer documents" in error["message"]


def test_a_model_of_text_alone_takes_no_images(token_rows: httpx.Client) -> None:
    answer = token_rows.post("/tokenize", json={"input": ["a", {"image": UNREACHABLE}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[1].image")
    assert "reads text alone" in error["message"]


def test_a_model_without_instructions_refuses_one_by_name(vectors: httpx.Client) -> None:
    user = {"role": "user", "content": "a"}
    for body in (
        {"input": ["a", "b"], "instruction": "find"},
        {"input": [{"text": "a", "instruction": "find"}]},
        {"messages": [{"role": "system", "content": "find"}, user]},
    ):
        answer = vectors.post("/v1/embeddings", json=body)
        assert answer.status_code == 400
        assert "instruction" in answer.json()["error"]["message"]
    assert vectors.post("/embed", json={"inputs": "a", "instruction": "find"}).status_code == 422
    assert vectors.post("/v2/embed", json={"texts": ["a"], "instruction": "find"}).status_code == 400
