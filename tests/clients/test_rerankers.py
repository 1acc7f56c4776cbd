"""Frameworks' clients of rerankers, in an environment of their own, against both kinds of service."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients import rerankers
from tests.clients.conftest import ClosedService
from tests.clients.environment import clients_environment
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.timeout(600)]

ASKED = {"query": "a red flower", "documents": ["a meadow", "a red flower", "the river is long"]}
# Those that say how many they want: langchain-cohere's default is three, as there are.
FEW = {"litellm-cohere", "litellm-voyage-top", "litellm-tei", "litellm-nim-ranking"}
NIM = {name for name in rerankers.CLIENTS if name.endswith("-nvidia") or "-nim" in name}


@pytest.fixture(scope="module")
def python() -> Path:
    return clients_environment("rerankers") / "bin" / "python"


def found(python: Path, service: ClosedService) -> dict[str, Any]:
    """What each client answers, or its error."""
    ran = subprocess.run(
        [python, rerankers.__file__, service.url, service.key, MODEL, json.dumps(ASKED)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        # Nothing of this repository is to be found there.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert answers.keys() == rerankers.CLIENTS.keys()
    return answers


def check(answers: dict[str, Any], wanted: dict[str, list[float]]) -> None:
    for name, values in wanted.items():
        best = sorted(enumerate(values), key=lambda row: -row[1])[: 2 if name in FEW else None]
        assert not isinstance(answers[name], str), (name, answers[name])
        assert [index for index, _ in answers[name]] == [index for index, _ in best], name
        assert [score for _, score in answers[name]] == pytest.approx([score for _, score in best], abs=1e-4)


def scores(http: httpx.Client) -> list[float]:
    both = {"queries": ASKED["query"], "documents": ASKED["documents"], "use_activation": False}
    return [row["score"] for row in http.post("/score", json=both).json()["data"]]


def test_a_reranker(python: Path, reranker: ClosedService) -> None:
    with reranker.http() as http:
        logits = scores(http)
    probabilities = [float(1 / (1 + np.exp(-logit))) for logit in logits]
    wanted = {name: logits if name in NIM else probabilities for name in rerankers.CLIENTS}
    check(found(python, reranker), wanted)


def test_a_model_of_vectors(python: Path, service: ClosedService) -> None:
    with service.http() as http:
        cosines = scores(http)
    answers = found(python, service)
    check(answers, {name: cosines for name in rerankers.CLIENTS if name not in NIM})
    for name in NIM:
        assert "404" in answers[name] or "vector as its output" in answers[name], (name, answers[name])
