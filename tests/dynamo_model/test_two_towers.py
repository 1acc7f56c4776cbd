"""A family in which an image's row is its vector, behind an unmodified ``dynamo.frontend``."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.towers import SIGLIP_TINY
from tests.dynamo_model.conftest import stock_frontend
from tests.e2e.service import MODEL, launch
from tests.models.running import Given
from tests.references.families import reference_of

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.timeout(900)]

TEXTS = ["a photo of a temple", "RIVER!"]
WAYS = {"agg": ("agg.sh", 1), "split": ("e_p.sh", 2)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("towers") / "model"
    write_checkpoint(path, SIGLIP_TINY)
    return path


@pytest.fixture(scope="module", params=WAYS)
def stock_towers(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    dynamo_python: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A client of a stock frontend in front of both towers in one worker, or each in its own."""
    script, workers = WAYS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    store = folder / "discovery"
    with (
        launch(
            script,
            checkpoint,
            folder / "log",
            workers=workers,
            arguments=("--dynamo-model",),
            environment={"DYN_FILE_KV": str(store)},
        ),
        stock_frontend(dynamo_python, store, folder / "stock", (MODEL,)) as client,
    ):
        yield client


def data_url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def test_texts_and_images_are_those_of_transformers(
    stock_towers: httpx.Client, checkpoint: Path, photos: dict[str, bytes]
) -> None:
    reference = reference_of(checkpoint)
    pictures = list(photos.values())
    given: list[str | bytes] = [*TEXTS, *pictures]
    expected = np.stack([reference.answer(Given(parts=(each,))) for each in given])
    # The second time the images are cached.
    for _ in range(2):
        asked = [*TEXTS, *map(data_url, pictures)]
        answer = stock_towers.post("/v1/embeddings", json={"model": MODEL, "input": asked})
        assert answer.status_code == 200, answer.text
        found = np.array([row["embedding"] for row in answer.json()["data"]])
        assert np.einsum("ij,ij->i", found, expected).min() >= 0.99999


def test_a_text_beside_an_image_is_refused_by_name(
    stock_towers: httpx.Client, photos: dict[str, bytes]
) -> None:
    mixed = f"a flower {data_url(photos['flower'])}"
    answer = stock_towers.post("/v1/embeddings", json={"model": MODEL, "input": ["good", mixed]})
    assert answer.status_code == 400, answer.text
    assert "input[1] has an image and more" in answer.text
