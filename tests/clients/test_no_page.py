"""A service that was started without the try-it page, with metrics for everybody and the rest for keys."""

from __future__ import annotations

import httpx
import pytest

from tests.clients.conftest import ClosedService

pytestmark = pytest.mark.service


def test_only_the_metrics_need_no_key(service: ClosedService) -> None:
    for path in ("/metrics", "/v1/metrics"):
        assert "tessera_workers{" in httpx.get(f"{service.url}{path}").text
    for path in ("/status", "/v1/metadata", "/v1/version", "/v1/license", "/v1/manifest"):
        assert httpx.get(f"{service.url}{path}").status_code == 401
    assert httpx.post(f"{service.url}/v1/embeddings", json={"input": "a"}).status_code == 401


def test_there_is_no_page(service: ClosedService, http: httpx.Client) -> None:
    # Text-Embeddings-Inference's clients post there.
    assert http.get("/").status_code == 405
    assert http.get("/examples/examples.json").status_code == 404
    # What is not there is not said to those without a key.
    assert httpx.get(service.url).status_code == 401
    said = service.running.log.read_text()
    assert "in a browser" not in said and "Bearer KEY" in said
    assert http.get("/status").json()["workers"][0]["role"] == "agg"
