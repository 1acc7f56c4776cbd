"""Frameworks' clients of rerankers, in an environment of their own, against both kinds of service."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients import rerankers
from tests.clients.conftest import ClosedService
from tests.clients.environment import answers_of
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.timeout(600)]

QUERY = "a red flower"
DOCUMENTS = ["a meadow", "a red flower", "the river is long"]
# Those that say how many they want: langchain-cohere's default is three, as there are.
FEW = {"litellm-cohere", "litellm-voyage-top", "litellm-tei", "litellm-nim-ranking"}
NIM = {name for name in rerankers.CLIENTS if name.endswith("-nvidia") or "-nim" in name}


def found(service: ClosedService) -> dict[str, Any]:
    """What each client answers, or its error."""
    return answers_of("frameworks", rerankers, service, MODEL, QUERY, DOCUMENTS)


def check(answers: dict[str, Any], wanted: dict[str, list[float]]) -> None:
    for name, values in wanted.items():
        best = sorted(enumerate(values), key=lambda row: -row[1])[: 2 if name in FEW else None]
        assert not isinstance(answers[name], str), (name, answers[name])
        assert [index for index, _ in answers[name]] == [index for index, _ in best], name
        assert [score for _, score in answers[name]] == pytest.approx([score for _, score in best], abs=1e-4)


def scores(http: httpx.Client) -> list[float]:
    both = {"queries": QUERY, "documents": DOCUMENTS, "use_activation": False}
    return [row["score"] for row in http.post("/score", json=both).json()["data"]]


def test_a_reranker(reranker: ClosedService) -> None:
    with reranker.http() as http:
        logits = scores(http)
    probabilities = [float(1 / (1 + np.exp(-logit))) for logit in logits]
    wanted = {name: logits if name in NIM else probabilities for name in rerankers.CLIENTS}
    check(found(reranker), wanted)


def test_a_model_of_vectors(service: ClosedService) -> None:
    with service.http() as http:
        cosines = scores(http)
    answers = found(service)
    check(answers, {name: cosines for name in rerankers.CLIENTS if name not in NIM})
    for name in NIM:
        assert "404" in answers[name] or "vector as its output" in answers[name], (name, answers[name])
