"""A model for late interaction behind both launch scripts: texts, a query, images, and large pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tessera.models import open_model
from tessera.models.base import Role
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.qwen3 import COL_TINY
from tests.e2e.inputs import parts, scaled
from tests.e2e.service import MODEL, Service, launch
from tests.models.running import Given, batch_of, vectors

pytestmark = [pytest.mark.service, pytest.mark.large]

# As wide as the widest that are published: a page is 16 MB of float32.
WIDTH = 3072


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "colqwen3"
    write_checkpoint(path, replace(COL_TINY, width=WIDTH), seed=3)
    return path


@pytest.fixture(scope="module")
def given(photos: dict[str, bytes]) -> list[Given]:
    pages = [scaled(photos[name], 1000 + 32 * place, 1300) for place, name in enumerate(("china", "flower"))]
    return [
        Given(parts=("a yellow heart",)),
        Given(parts=(scaled(photos["flower"], 128, 256),)),
        Given(parts=(scaled(photos["china"], 320, 96), "a wide picture")),
        *(Given(parts=(page,)) for page in pages * 2),
    ]


@pytest.fixture(scope="module")
def expected(model: Path, given: list[Given]) -> list[np.ndarray]:
    """What the modules give in this process: of each input a matrix, and of the first as a query."""
    opened = open_model(model)
    inputs = [replace(given[0], role=Role.QUERY), *given[:5]]
    vision = opened.load_vision(dtype="float32", device="cpu")
    text = opened.load_text(dtype="float32", device="cpu")
    found = []
    with torch.no_grad():
        for each in inputs:
            rows = vectors(opened, text, batch_of(opened, vision, [each]))
            found.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    return [*found, *found[-2:]]


@pytest.fixture(scope="module", params=[("agg.sh", 1), ("e_p.sh", 2)], ids=["agg", "e_p"])
def service(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    script, workers = request.param
    with launch(script, model, tmp_path_factory.mktemp("log") / "log", workers=workers) as running:
        yield running


def as_sent(given: Given) -> Any:
    text = next((part for part in given.parts if isinstance(part, str)), None)
    return parts(text, *given.images) if given.images else text


def matrices(answer: httpx.Response) -> list[np.ndarray]:
    assert answer.status_code == 200, answer.text
    items = json.loads(answer.headers["metadata"])["data"]
    return [
        np.frombuffer(answer.content[item["start"] : item["end"]], "<f4").reshape(item["shape"])
        for item in items
    ]


def test_rows_are_those_of_the_engine_in_this_process(
    service: Service, given: list[Given], expected: list[np.ndarray]
) -> None:
    query, *others = expected
    with httpx.Client(base_url=service.url, timeout=300) as http:
        asked: dict[str, Any] = {"model": MODEL, "input": "a yellow heart", "input_type": "query"}
        (row,) = http.post("/v1/embeddings", json=asked).json()["data"]
        np.testing.assert_allclose(np.array(row["embedding"]), query, atol=1e-4)
        # 64 MB of rows in one request, four pages of which are two: more than a message may have.
        inputs = [as_sent(each) for each in given]
        for _ in range(2):
            answer = http.post("/pooling", json={"model": MODEL, "input": inputs, "encoding_format": "bytes"})
            found = matrices(answer)
            assert [rows.shape for rows in found] == [rows.shape for rows in others]
            assert sum(rows.nbytes for rows in found) > 60e6
            for rows, wanted in zip(found, others, strict=True):
                assert (rows * wanted).sum(axis=1).min() >= 0.9999
        usage = json.loads(answer.headers["metadata"])["usage"]
        # The second time no image was encoded again.
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == details["image_tokens"] > 4 * 1000
        card = http.get("/v1/models").json()["data"][0]
    assert (card["output"]["kind"], card["output"]["width"]) == ("tokens", WIDTH)
    assert card["images"] and card["task"] == "token_embed" and "/pooling" in card["routes"]
