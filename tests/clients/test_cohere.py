"""The cohere package, and what it does not show, against a running service."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import cohere
import httpx
import numpy as np
import pytest
from cohere.errors import BadRequestError, NotFoundError, UnauthorizedError

from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service


@pytest.fixture
def wire() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture
def client(service: ClosedService, wire: httpx.Client) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=service.key, base_url=service.url, httpx_client=wire)


def test_texts_in_every_type(client: cohere.ClientV2, reference: Reference) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = client.embed(
        model=MODEL, texts=["hello", "world"], input_type="search_query", embedding_types=types
    )
    found = answer.embeddings
    assert cosine(np.array(found.float_[0], np.float32), reference.vector("hello", [], "query")) >= 0.9999
    for index, text in enumerate(found.base64):
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(text), "<f4"), found.float_[index], atol=1e-6
        )
    width = len(found.float_[0])
    assert [len(rows[1]) for rows in (found.int8, found.uint8, found.binary, found.ubinary)] == [
        *(width, width, width // 8, width // 8)
    ]
    assert answer.texts == ["hello", "world"]
    assert answer.meta.billed_units.input_tokens > 0


def test_images_and_mixed_inputs(
    client: cohere.ClientV2, photos: dict[str, bytes], reference: Reference
) -> None:
    url = data_url(photos["flower"])
    image = client.embed(model=MODEL, images=[url], input_type="image", embedding_types=["float"])
    assert image.meta.billed_units.image_tokens > 0
    content = [{"type": "text", "text": "a flower"}, {"type": "image_url", "image_url": {"url": url}}]
    mixed = client.embed(model=MODEL, inputs=[{"content": content}], input_type="search_document")
    for answer, text in ((image, None), (mixed, "a flower")):
        expected = reference.vector(text, [photos["flower"]], "passage")
        assert cosine(np.array(answer.embeddings.float_[0], np.float32), expected) >= 0.9999


def test_errors(
    client: cohere.ClientV2, service: ClosedService, http: httpx.Client, wire: httpx.Client
) -> None:
    with pytest.raises(BadRequestError) as bad:
        client.embed(model=MODEL, texts=[""], input_type="search_query")
    assert "texts[0]" in bad.value.body["message"]
    with pytest.raises(NotFoundError):
        client.embed(model="another", texts=["x"], input_type="search_query")
    with pytest.raises(UnauthorizedError):
        cohere.ClientV2(api_key="sk-wrong-0123456789", base_url=service.url, httpx_client=wire).embed(
            model=MODEL, texts=["x"], input_type="search_query"
        )
    for body in (
        {"texts": ["x"], "images": ["y"]},
        {},
        {"texts": ["x"], "input_type": "other"},
        {"texts": ["x"], "embedding_types": ["int4"]},
        {"texts": ["x"], "unknown": 1},
        {"texts": []},
        {"texts": ["x"], "output_dimension": 0},
    ):
        answer = http.post("/v2/embed", json=body)
        assert (answer.status_code, list(answer.json())) == (400, ["message"]), body


def test_long_texts_lose_their_end_unless_told_otherwise(client: cohere.ClientV2) -> None:
    long = "word " * 20_000
    assert len(client.embed(model=MODEL, texts=[long], input_type="search_document").embeddings.float_) == 1
    with pytest.raises(BadRequestError):
        client.embed(model=MODEL, texts=[long], input_type="search_document", truncate="NONE")
