"""The logits of a running reranker are those of transformers' own modules, images on either side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import ClosedService
from tests.e2e.inputs import data_url
from tests.e2e.service import MODEL
from tests.models.llama_nemotron_rerank_vl import cases
from tests.models.running import Given
from tests.references.rerank import RerankVLReference

pytestmark = pytest.mark.service

# Of text, of an image of seven tiles, of one tile, and of an image beside the query.
CASES = [cases.CASES[number] for number in (2, 3, 4, 7)]


def side(given: Given) -> dict[str, Any]:
    return {
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in given.parts
        ]
    }


def test_logits_over_http(reranker: ClosedService) -> None:
    found = []
    with reranker.http() as client:
        for pair in CASES:
            body = {
                "model": MODEL,
                "queries": side(pair.query),
                "documents": [side(pair.document)],
                "use_activation": False,
            }
            answer = client.post("/score", json=body)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["data"][0]["score"])
    reference = RerankVLReference(reranker.media / MODEL)
    expected = np.concatenate([reference.answer(pair) for pair in CASES])
    assert expected.std() >= 1
    assert np.abs(np.array(found) - expected).max() <= 1e-3
