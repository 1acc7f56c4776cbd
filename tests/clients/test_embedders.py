"""NVIDIA's clients for vectors in three frameworks and a gateway, in an environment of their own."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients import embedders
from tests.clients.conftest import ClosedService
from tests.clients.environment import answers_of
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.timeout(600)]

QUERY = "a red flower"
# More than langchain and haystack put into one request.
PASSAGES = [f"the river of page {index}" for index in range(70)]


@pytest.fixture(scope="module")
def found(service: ClosedService) -> dict[str, Any]:
    # The name as a client may write it.
    return answers_of("frameworks", embedders, service, MODEL.title(), QUERY, PASSAGES)


@pytest.mark.parametrize("client", embedders.CLIENTS)
def test_queries_and_passages(client: str, found: dict[str, Any], http: httpx.Client) -> None:
    assert not isinstance(found[client], str), found[client]
    query, passages = found[client]
    for vectors, texts, role in (
        ([query], [QUERY], "query"),
        (passages, PASSAGES, "passage"),
    ):
        answer = http.post("/v1/embeddings", json={"input": texts, "input_type": role}).json()
        wanted = [row["embedding"] for row in answer["data"]]
        np.testing.assert_allclose(vectors, wanted, atol=1e-5)
