"""A family with grids of any size and rows four times as wide as the backbone, through every way they go."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tessera.transport.kinds.nixl_agent import nixl_missing
from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, Service, launch

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "vision"
    write_checkpoint(["--out", str(path), "--family", "qwen3_vl_embedding", "--size", "tiny"])
    return path


def scaled(photo: bytes, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).resize((width, height)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def inputs(photos: dict[str, bytes]) -> list[Any]:
    """Texts, small and large images, several images, and text before an image."""
    china, flower = photos["china"], photos["flower"]
    small, page = scaled(flower, 70, 50), scaled(china, 1275, 1650)
    return [
        "a yellow heart",
        parts(None, small),
        parts("compare", scaled(china, 320, 96), small),
        [{"type": "text", "text": "before"}, *parts("and after", scaled(flower, 128, 256))],
        parts("a page", page),
    ]


def embed(service: Service, inputs: list[Any]) -> np.ndarray:
    answer = httpx.post(f"{service.url}/v1/embeddings", json={"model": MODEL, "input": inputs}, timeout=300)
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


@pytest.fixture(scope="module")
def aggregated(
    model: Path, inputs: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[np.ndarray]:
    """What one process gives that keeps its rows."""
    with launch("agg.sh", model, tmp_path_factory.mktemp("log") / "agg", workers=1) as service:
        yield embed(service, inputs)


def as_read(given: Any) -> list[str | bytes]:
    """An input as the family's reference takes it: texts and files in their order."""
    if isinstance(given, str):
        return [given]
    return [
        part["text"]
        if part["type"] == "text"
        else base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
        for part in given
    ]


def test_vectors_are_those_of_transformers(model: Path, inputs: list[Any], aggregated: np.ndarray) -> None:
    from tests.references.qwen3 import Qwen3VLReference

    reference = Qwen3VLReference(model)
    for given, found in zip(inputs, aggregated, strict=True):
        assert found @ reference.vector(as_read(given)) >= 0.99999


_no_nixl = pytest.mark.skipif(nixl_missing() is not None, reason="needs nixl")


@pytest.mark.parametrize("kind", ["shm", "inline", pytest.param("nixl", marks=_no_nixl)])
def test_vectors_are_the_same_by_every_way(
    kind: str, model: Path, inputs: list[Any], aggregated: np.ndarray, tmp_path: Path
) -> None:
    environment = {}
    for role in ("encode", "embed"):
        config = tmp_path / f"{role}.yaml"
        config.write_text(
            f"transport: {{kind: {kind}, staging_mb: 1}}\nvision: {{max_batch_cost: 0, max_queue_cost: 0}}\n"
        )
        environment[f"TESSERA_{role.upper()}_ENGINE_ARGS"] = str(config)
    with launch("e_p.sh", model, tmp_path / "log", workers=2, environment=environment) as service:
        for _ in range(2):
            # Four images, one of them twice, which is looked up once; the second time from the cache.
            np.testing.assert_allclose(embed(service, inputs), aggregated, atol=1e-5)
        assert service.worker_metric(1, "tessera_transfers_total", route=kind, outcome="ok") == 4
        assert service.worker_metric(1, "tessera_embedding_cache_hits_total") == 4
        assert service.worker_metric(0, "tessera_batch_units_sum") == service.worker_metric(
            0, "tessera_batch_tiles_sum"
        )


def test_options_of_the_model_reach_every_process(model: Path, inputs: list[Any], tmp_path: Path) -> None:
    """A page is shrunk to 64 tokens by the frontend's plan and by the decoders alike."""
    environment = {"TESSERA_MODEL_OPTIONS": '{"max_pixels": 65536}', "TESSERA_ENCODE_WORKERS": "1"}
    with launch("e_p.sh", model, tmp_path / "log", workers=2, environment=environment) as service:
        body = {"model": MODEL, "input": inputs[-1:]}
        answer = httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] < 128
        units = service.worker_metric(0, "tessera_batch_units_sum")
        assert 200 < units <= 256
