"""Pages of other origins: what a browser asks before it asks, and what it may read of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tessera.errors import ConfigError
from tessera.flags import check_flags
from tessera.frontend.admission.room import Admission
from tessera.frontend.http.cors import CorsSettings
from tessera.frontend.http.middleware import RequestMiddleware
from tessera.frontend.metrics import FrontendMetrics
from tests.e2e.service import MODEL
from tests.frontend.alone import frontend

APP = "https://app.example.com"
OTHER = "https://other.example.com"
KEY = "sk-0123456789"
ORIGIN = "access-control-allow-origin"


def preflight(client: httpx.Client, origin: str, method: str = "POST") -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }
    return client.options("/v1/embeddings", headers=headers)


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A frontend with a key, whose rate is one request, and with small bodies."""
    flags = ["--cors-allow-origins", APP, "http://localhost:3000", "--cors-max-age", "60"]
    flags += ["--requests-per-minute", "3", "--max-body-mb", "0.001"]
    folder = tmp_path_factory.mktemp("cors")
    with frontend(checkpoint, folder, *flags, environment={"TESSERA_API_KEYS": KEY}) as running:
        yield running


@pytest.mark.service
def test_a_preflight_needs_no_key(client: httpx.Client) -> None:
    for origin in (APP, "http://localhost:3000"):
        answer = preflight(client, origin)
        assert answer.status_code == 200 and answer.headers[ORIGIN] == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert answer.headers["access-control-max-age"] == "60"
        assert "access-control-allow-credentials" not in answer.headers
    refused = preflight(client, OTHER)
    assert refused.status_code == 400 and ORIGIN not in refused.headers


@pytest.mark.service
def test_every_error_can_be_read_by_the_page(client: httpx.Client) -> None:
    headers = {"origin": APP, "authorization": f"Bearer {KEY}"}
    body = {"model": MODEL, "input": "a text"}
    unknown = client.post("/v1/embeddings", json=body, headers={"origin": APP})
    large = client.post("/v1/embeddings", json=body | {"input": "x" * 2000}, headers=headers)
    wrong = client.post("/v1/embeddings", json=body | {"colour": 1}, headers=headers)
    nobody = client.post("/v1/embeddings", json=body, headers=headers)
    rate = client.post("/v1/embeddings", json=body, headers=headers)
    found = (unknown, large, wrong, nobody, rate)
    assert [answer.status_code for answer in found] == [401, 413, 400, 503, 429]
    for answer in found:
        assert answer.headers[ORIGIN] == APP and "Origin" in answer.headers["vary"]
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        assert answer.headers["x-request-id"]
    assert client.get("/live", headers={"origin": APP}).headers[ORIGIN] == APP
    assert ORIGIN not in client.get("/live", headers={"origin": OTHER}).headers


async def test_an_unforeseen_error_has_the_headers_too() -> None:
    async def failing(*_: object) -> None:
        raise RuntimeError("nobody foresaw it")

    admission = Admission(max_requests=1, max_response_bytes=1)
    inner = RequestMiddleware(
        failing, keys=None, limiter=None, admission=admission, metrics=FrontendMetrics()
    )
    transport = httpx.ASGITransport(CorsSettings(allow_origins=("*",)).around(inner))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as asking:
        answer = await asking.get("/status", headers={"origin": OTHER})
    assert answer.status_code == 500 and answer.headers[ORIGIN] == "*"


@pytest.mark.service
def test_without_origins_nothing_is_said(checkpoint: Path, tmp_path: Path) -> None:
    with frontend(checkpoint, tmp_path) as plain:
        assert preflight(plain, APP).status_code == 405
        assert ORIGIN not in plain.get("/live", headers={"origin": APP}).headers


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "https://a b"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^--cors-allow-origins: .* is no origin, such as"):
        check_flags(CorsSettings, ["--cors-allow-origins", origin])
