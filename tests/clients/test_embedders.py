"""NVIDIA's clients for vectors in three frameworks and a gateway, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients import embedders
from tests.clients.conftest import ClosedService
from tests.clients.environment import clients_environment
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.timeout(600)]

# More than langchain and haystack put into one request.
ASKED = {"query": "a red flower", "passages": [f"the river of page {index}" for index in range(70)]}


@pytest.fixture(scope="module")
def found(service: ClosedService) -> dict[str, Any]:
    """What each client answers, or its error."""
    python = clients_environment("rerankers") / "bin" / "python"
    # As a client may write it.
    name = MODEL.title()
    ran = subprocess.run(
        [python, embedders.__file__, service.url, service.key, name, json.dumps(ASKED)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        # Nothing of this repository is to be found there.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert answers.keys() == embedders.CLIENTS.keys()
    return answers


@pytest.mark.parametrize("client", embedders.CLIENTS)
def test_queries_and_passages(client: str, found: dict[str, Any], http: httpx.Client) -> None:
    assert not isinstance(found[client], str), found[client]
    query, passages = found[client]
    for vectors, texts, role in (
        ([query], [ASKED["query"]], "query"),
        (passages, ASKED["passages"], "passage"),
    ):
        answer = http.post("/v1/embeddings", json={"input": texts, "input_type": role}).json()
        wanted = [row["embedding"] for row in answer["data"]]
        np.testing.assert_allclose(vectors, wanted, atol=1e-5)
