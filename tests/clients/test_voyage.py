"""The voyageai package against a running service."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import requests
import voyageai
from PIL import Image
from voyageai.api_resources.api_requestor import _thread_context
from voyageai.error import AuthenticationError, InvalidRequestError

from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service


@pytest.fixture
def client(service: ClosedService, monkeypatch: pytest.MonkeyPatch) -> Iterator[voyageai.Client]:
    # The package keeps its connection in the thread and closes it only when it is old.
    with requests.Session() as session:
        session.trust_env = False
        monkeypatch.setattr(_thread_context, "session", session, raising=False)
        monkeypatch.setattr(_thread_context, "session_create_time", time.time(), raising=False)
        yield voyageai.Client(api_key=service.key, base_url=f"{service.url}/v1")


def test_text(client: voyageai.Client, reference: Reference) -> None:
    answer = client.embed(["hello"], model=MODEL, input_type="query")
    assert (
        cosine(np.array(answer.embeddings[0], np.float32), reference.vector("hello", [], "query")) >= 0.9999
    )
    assert answer.total_tokens > 0


def test_multimodal(client: voyageai.Client, photos: dict[str, bytes], reference: Reference) -> None:
    picture = Image.open(io.BytesIO(photos["flower"]))
    answer = client.multimodal_embed(
        [["a flower", picture], ["text alone"]], model=MODEL, input_type="document"
    )
    expected = reference.vector("a flower", [photos["flower"]], "passage")
    assert cosine(np.array(answer.embeddings[0], np.float32), expected) >= 0.9999
    assert answer.image_pixels == picture.width * picture.height
    assert answer.total_tokens > answer.text_tokens > 0


def test_errors(client: voyageai.Client, service: ClosedService, http: httpx.Client) -> None:
    with pytest.raises(InvalidRequestError, match=r"inputs\[0\]"):
        client.multimodal_embed([[""]], model=MODEL)
    with pytest.raises(AuthenticationError):
        voyageai.Client(api_key="sk-wrong-0123456789", base_url=f"{service.url}/v1").multimodal_embed(
            [["x"]], model=MODEL
        )
    content = [{"type": "text", "text": "x"}]
    for body in (
        {},
        {"inputs": []},
        {"inputs": [{"content": [{"type": "video_url", "video_url": "x"}]}]},
        {"inputs": [{"content": content}], "output_encoding": "hex"},
        {"inputs": [{"content": content}], "output_dtype": "float64"},
        {"inputs": [{"content": content}], "more": 1},
    ):
        answer = http.post("/v1/multimodalembeddings", json=body)
        assert (answer.status_code, list(answer.json())) == (400, ["detail"]), body


def test_encodings(http: httpx.Client, photos: dict[str, bytes]) -> None:
    url = data_url(photos["flower"])
    body = {"inputs": [{"content": [{"type": "image_base64", "image_base64": url}]}], "model": MODEL}
    width = len(http.post("/v1/multimodalembeddings", json=body).json()["data"][0]["embedding"])
    coded = http.post("/v1/multimodalembeddings", json=body | {"output_encoding": "base64"}).json()
    assert isinstance(coded["data"][0]["embedding"], str)
    packed = http.post("/v1/multimodalembeddings", json=body | {"output_dtype": "ubinary"}).json()
    assert len(packed["data"][0]["embedding"]) == width // 8
