"""Pairs of texts and pictures behind encode and embed workers: the logits of the reference, twice."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.service import MODEL, launch
from tests.models.qwen3_vl_embedding.cases import SMALL, TALL, WIDE
from tests.models.running import Given, Pair
from tests.references.qwen3 import Qwen3VLRerankReference

pytestmark = pytest.mark.service

QUERY: tuple[str | bytes, ...] = (WIDE, "Which page shows the river?")
DOCUMENTS: list[tuple[str | bytes, ...]] = [
    ("the river under the bridge",),
    (TALL,),
    (SMALL, "a market in the light of morning"),
    (TALL, WIDE),
]


def content(parts: tuple[str | bytes, ...]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(part).decode()},
        }
        for part in parts
    ]


def test_logits_are_the_references(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_checkpoint(["--out", str(path), "--family", "qwen3_vl_rerank", "--size", "tiny"])
    reference = Qwen3VLRerankReference(path)
    wanted = [
        reference.answer(Pair(query=Given(parts=QUERY), document=Given(parts=document))).item()
        for document in DOCUMENTS
    ]
    body = {
        "model": MODEL,
        "query": {"content": content(QUERY)},
        "documents": [{"content": content(document)} for document in DOCUMENTS],
        "use_activation": False,
    }
    with launch("e_p.sh", path, tmp_path / "log", workers=2) as service:
        for _ in range(2):
            answer = httpx.post(f"{service.url}/v1/rerank", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            logits = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
            found = [logits[index] for index in range(len(DOCUMENTS))]
            np.testing.assert_allclose(found, wanted, atol=2e-4)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
