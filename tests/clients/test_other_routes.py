"""TEI's route, /tokenize, NIM's health, the OpenAPI document, and LangChain."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference
from tests.waiting import wait_until

pytestmark = pytest.mark.service


def test_tei(http: httpx.Client, reference: Reference) -> None:
    plain = reference.vector("hello", [], "none")
    ids = reference.tokens("hello", [], "none")
    for inputs in ("hello", ["hello"], ids, [ids, "hello"]):
        rows = [
            row
            for path in ("/embed", "/", "/invocations")
            for row in http.post(path, json={"inputs": inputs}).json()
        ]
        assert min(cosine(np.array(row, np.float32), plain) for row in rows) >= 0.9999
    (row,) = http.post("/embed", json={"inputs": "hello", "prompt_name": "query"}).json()
    assert cosine(np.array(row, np.float32), reference.vector("hello", [], "query")) >= 0.9999
    (row,) = http.post("/embed", json={"inputs": "hello", "normalize": False}).json()
    pooled = reference.vector("hello", [], "none", normalize=False)
    np.testing.assert_allclose(np.array(row, np.float32), pooled, atol=2e-4 * np.linalg.norm(pooled))
    # Text is text here: a data URL in it is no image.
    assert len(http.post("/embed", json={"inputs": "data:image/png;base64,AAAA"}).json()) == 1
    long = {"inputs": "word " * 20_000}
    assert (
        http.post("/embed", json=long | {"truncate": True, "truncation_direction": "Left"}).status_code == 200
    )
    for body in (long, {"inputs": ""}, {}, {"inputs": "x", "other": 1}, {"inputs": [["x"]]}):
        answer = http.post("/embed", json=body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation"), body
        assert answer.json().keys() == {"error", "error_type"}
    for path in ("/embed", "/invocations", "/tokenize"):
        empty, many = (http.post(path, json={"inputs": inputs}) for inputs in ([], ["x"] * 9000))
        assert (empty.status_code, empty.json()["error_type"]) == (400, "Empty")
        assert (many.status_code, many.json()["error_type"]) == (413, "Validation")
    for path in ("/embed", "/"):
        assert httpx.post(http.base_url.join(path), json=long).json()["error_type"] == "Unauthorized"


def test_tokenize(http: httpx.Client, reference: Reference, photos: dict[str, bytes]) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "hello there"}).json()
    assert answer["tokens"] == reference.tokens("hello there", [], "none")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] > answer["count"]
    url = data_url(photos["flower"])
    several = http.post("/tokenize", json={"input": ["a", {"text": "b", "image": url}]}).json()
    tiles = len(reference.tiles(photos["flower"]))
    assert several["data"][1]["tokens"] == reference.tokens("b", [tiles], "passage")
    assert several["count"] == sum(row["count"] for row in several["data"])
    assert http.post("/tokenize", json={"prompt": "a", "input": "b"}).status_code == 400


def test_nim_health_needs_no_key(service: ClosedService) -> None:
    ready = httpx.get(f"{service.url}/v1/health/ready")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert httpx.get(f"{service.url}/v1/health/live").json()["live"] is True


def test_tokenize_in_teis_shape(http: httpx.Client, reference: Reference) -> None:
    text = "hello, wörld"
    ids = reference.tokens(text, [], "none")
    (pieces,) = http.post("/tokenize", json={"inputs": text}).json()
    assert [piece["id"] for piece in pieces] == ids
    first, *rest = pieces
    assert (first["special"], first["start"], first["stop"]) == (True, None, None)
    assert first["text"] == "<|begin_of_text|>"
    for piece in rest:
        assert not piece["special"]
        assert piece["text"] == text[piece["start"] : piece["stop"]]
    assert rest[-1]["stop"] == len(text)
    two = http.post("/tokenize", json={"inputs": ["a", text], "add_special_tokens": False}).json()
    assert two[1] == rest
    (query,) = http.post("/tokenize", json={"inputs": "hello", "prompt_name": "query"}).json()
    assert [piece["id"] for piece in query] == reference.tokens("hello", [], "query")
    bad = http.post("/tokenize", json={"inputs": [1]})
    assert (bad.status_code, bad.json()["error_type"]) == (422, "Validation")
    spelled = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert spelled["tokens"] == ids
    assert len(spelled["token_strs"]) == len(ids)
    assert spelled["token_strs"][0] == "<|begin_of_text|>"


def test_methods(service: ClosedService, http: httpx.Client) -> None:
    for path in ("/health", "/ping", "/live", "/v1/health/ready", "/v1/health/live"):
        answer = httpx.head(f"{service.url}{path}")
        assert (answer.status_code, answer.content) == (200, b""), path
    for method, path, allowed in (("GET", "/v1/embeddings", "POST"), ("DELETE", "/v1/models", "GET")):
        answer = http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        error = answer.json()["error"]
        assert error["code"] == "method_not_allowed"
        assert f"{method} {path}" in error["message"] and allowed in error["message"]


def test_an_unknown_route_is_named(http: httpx.Client) -> None:
    answer = http.post("/embedding", json={"model": "x", "input": "a route of another server"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "POST /embedding" in answer.json()["error"]["message"]
    # Nor is a slash too many a reason to send a client to whatever host it named.
    for path in ("/v1/embeddings/", "/docs/", "/v1/models/", "/status/"):
        answer = http.request("POST" if "emb" in path else "GET", path, headers={"host": "elsewhere"})
        assert (answer.status_code, "location" in answer.headers) == (404, False), path


def test_heads_are_bounded(service: ClosedService) -> None:
    answer = httpx.get(f"{service.url}/health", headers={"x-large": "a" * 70_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "header_too_large")


def test_a_form_is_told_that_it_is_no_json(http: httpx.Client) -> None:
    for path in ("/v1/embeddings", "/tokenize"):
        answer = http.post(path, files={"file": b"abc"})
        assert answer.status_code == 400
        assert "its Content-Type is multipart/form-data, not" in answer.json()["error"]["message"]
    named = http.post("/tokenize", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert named.status_code == 200


def logged(service: ClosedService, name: str) -> str:
    """The line about a request, which is written behind its answer."""

    def lines() -> list[str]:
        return [line for line in service.running.log.read_text().splitlines() if name in line]

    return wait_until(lines, said=lambda: f"no line about {name}")[0]


def fields(line: str) -> dict[str, str]:
    """What stands behind a line's message: its clock has any digits."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def test_a_damaged_body_is_no_departure(service: ClosedService) -> None:
    before = service.running.frontend_metric("tessera_disconnects_total")
    host, port = service.url.removeprefix("http://").split(":")
    for path, key in (("/v1/embeddings", "error"), ("/v2/embed", "message")):
        name = f"damaged-{key}"
        lines = (f"POST {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {service.key}")
        more = (f"X-Request-Id: {name}", "Transfer-Encoding: chunked", "", "ZZ", "")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall("\r\n".join(lines + more).encode())
            head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head, head
        assert f"x-request-id: {name}".encode() in head
        assert "transfer coding" in str(json.loads(body)[key])
        assert fields(logged(service, name))["status"] == "400"
    assert service.running.frontend_metric("tessera_disconnects_total") == before


def test_documentation(http: httpx.Client) -> None:
    page = http.get("/docs")
    for path in ("/v1/embeddings", "/v2/embed", "/embed", "/tokenize"):
        assert f"POST {path}" in page.text
    # Nothing is loaded, least of all from another host, and nothing runs.
    assert "<script" not in page.text and "src=" not in page.text and "http" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert http.get("/redoc").status_code == 404
    # JSON's names, and not another language's.
    for name in ("<td>True", "<td>False", "| None<", "| None |", "True |", "False |"):
        assert name not in page.text
    assert "true | null" in page.text
    document = http.get("/openapi.json").json()
    routes = (Path(__file__).parents[2] / "docs" / "api.md").read_text().partition("## Routes\n")[2]
    for path in document["paths"]:
        assert f"`{path}`" in routes or f" {path}`" in routes, path
    for path in ("/v1/embeddings", "/v2/embed", "/v1/multimodalembeddings", "/embed", "/tokenize"):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"], path
        assert schema["additionalProperties"] is False
        assert {"200", "400", "401", "429", "503"} <= operation["responses"].keys()


def test_langchain(service: ClosedService, reference: Reference) -> None:
    # Imported here: a second and a half of every process that collects these tests.
    from langchain_openai import OpenAIEmbeddings

    # Its own tokenisation is OpenAI's, which would be wrong for any other model.
    with httpx.Client() as wire:
        embeddings = OpenAIEmbeddings(
            model=MODEL,
            base_url=f"{service.url}/v1",
            api_key=service.key,
            check_embedding_ctx_length=False,
            http_client=wire,
        )
        documents = embeddings.embed_documents(["one", "two", "three"])
        query = embeddings.embed_query("one")
    assert cosine(np.array(documents[2], np.float32), reference.vector("three", [], "none")) >= 0.9999
    assert query == pytest.approx(documents[0], abs=1e-6)
