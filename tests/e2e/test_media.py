"""Images by URL and by local path, through frontends that the shared service's workers get for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import cosine
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(photos: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    for name, data in photos.items():
        (path / f"{name}.jpg").write_bytes(data)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["private-allowed", "default"])
def allowed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def frontend(allowed: bool, folder: Path, service: Disaggregated) -> Iterator[str]:
    """Its URL."""
    flags = ["--allowed-local-media-path", str(folder), *(["--allow-private-media"] if allowed else [])]
    with service.frontend(*flags) as url:
        yield url


def ask(frontend: str, url: str) -> httpx.Response:
    body = {"model": MODEL, "input": [[{"type": "image_url", "image_url": {"url": url}}]]}
    return httpx.post(f"{frontend}/v1/embeddings", json=body, timeout=60)


def test_an_image_by_url(
    frontend: str, allowed: bool, folder: Path, photos: dict[str, bytes], reference: Reference
) -> None:
    with file_server(folder) as url:
        answer = ask(frontend, f"{url}/china.jpg")
        missing = ask(frontend, f"{url}/missing.jpg")
    if not allowed:
        # Loopback is not reached unless it is allowed.
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "input[0][0].image_url.url"
        return
    vector = np.array(answer.json()["data"][0]["embedding"], np.float32)
    assert cosine(vector, reference.vector(None, [photos["china"]], "passage")) >= 0.9999
    assert missing.status_code == 422


def test_an_image_by_local_path(
    frontend: str, folder: Path, photos: dict[str, bytes], reference: Reference
) -> None:
    answer = ask(frontend, f"file://{folder}/flower.jpg")
    vector = np.array(answer.json()["data"][0]["embedding"], np.float32)
    assert cosine(vector, reference.vector(None, [photos["flower"]], "passage")) >= 0.9999
    assert ask(frontend, "file:///etc/hostname").status_code == 422
