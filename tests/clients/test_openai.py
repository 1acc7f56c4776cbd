"""The openai package against a running service."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest

from tests.clients.conftest import ClosedService
from tests.e2e.disaggregated import OTHER_NAME
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL

pytestmark = pytest.mark.service


@pytest.fixture
def client(service: ClosedService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)


def test_default_base64_and_floats_agree(client: openai.OpenAI) -> None:
    # The package asks for base64 unless told otherwise, and decodes it itself.
    with client:
        default = client.embeddings.create(model=MODEL, input=["one", "two"])
        floats = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [row.index for row in default.data] == [0, 1]
    np.testing.assert_allclose(
        [row.embedding for row in default.data], [row.embedding for row in floats.data], atol=1e-6
    )
    assert default.usage.prompt_tokens == default.usage.total_tokens > 0


async def test_async(service: ClosedService) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key) as client:
        answer = await client.embeddings.create(model=MODEL, input=[[1, 2, 3], [4]])
        assert len(answer.data) == 2
        models = [model.id async for model in client.models.list()]
        assert models == [MODEL, OTHER_NAME]
        assert (await client.models.retrieve(MODEL)).id == MODEL


def test_images_as_nim_strings(client: openai.OpenAI, photos: dict[str, bytes]) -> None:
    with client:
        answer = client.embeddings.create(
            model=f"{MODEL}-passage", input=[data_url(photos["china"]), "text"], encoding_format="float"
        )
    assert cosine(*(np.array(row.embedding, np.float32) for row in answer.data)) < 0.999


def test_errors_are_the_packages_own(client: openai.OpenAI, service: ClosedService) -> None:
    with client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.embeddings.create(model=MODEL, input=[""])
        assert bad.value.param == "input[0]"
        assert bad.value.code == "invalid_input"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="another", input="x")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")
    with (
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="sk-wrong-0123456789") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.embeddings.create(model=MODEL, input="x")


def test_raw_bytes(http: httpx.Client) -> None:
    for texts in (["a"], ["a", "b"]):
        body = {"model": MODEL, "input": texts, "encoding_format": "bytes"}
        answer = http.post("/v1/embeddings", json=body)
        assert answer.headers["content-type"] == "application/octet-stream"
        coded = http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"]
        rows = b"".join(base64.b64decode(row["embedding"]) for row in coded)
        # Two may fall into two batches, and then differ in their last bits.
        found, expected = (np.frombuffer(data, "<f4") for data in (answer.content, rows))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert len(texts) > 1 or answer.content == rows
