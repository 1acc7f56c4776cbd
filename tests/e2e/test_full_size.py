"""A random checkpoint of the real model's size is served on CPU, within its memory.

Takes minutes, 3.2 GB of disk and up to 12 GB of memory, so it runs only when ``TESSERA_FULL_SIZE`` is set.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from tessera.models import Model, open_model
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tests.e2e.service import MODEL, Service, launch
from tests.proc import peak_bytes

pytestmark = [
    pytest.mark.service,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("TESSERA_FULL_SIZE"), reason="TESSERA_FULL_SIZE is not set"),
]

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("full") / "checkpoint"
    make_checkpoint(["--out", str(path), "--size", "full", "--dtype", "bfloat16"])
    yield open_model(path)
    (path / "model.safetensors").unlink()


def tile_url(photo: bytes) -> str:
    """The photograph as one tile."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).crop((0, 0, 427, 427)).resize((512, 512)).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(("script", "roles"), [("agg.sh", ["agg"]), ("e_p.sh", ["encode", "embed"])])
def test_one_image_and_one_text(
    model: Model, tmp_path: Path, photos: dict[str, bytes], script: str, roles: list[str]
) -> None:
    settings = {"OMP_NUM_THREADS": "2"}
    with launch(script, model.path, tmp_path / "log", workers=len(roles), environment=settings) as service:
        with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            image = [{"type": "image_url", "image_url": {"url": tile_url(photos["china"])}}]
            answer = client.embeddings.create(model=MODEL, input=["a text", image])
        vectors = np.array([row.embedding for row in answer.data])
        assert vectors.shape == (2, 2048)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-4)
        check_memory(service, model, roles)


def check_memory(service: Service, model: Model, roles: list[str]) -> None:
    vision, text = model.vision_nbytes("float32"), model.text_nbytes("float32")
    weights = {"agg": vision + text, "encode": vision, "embed": text}
    for role, pid in zip(roles, service.pids()[1:], strict=True):
        used, limit = peak_bytes(pid), 1.2 * weights[role] + GIB
        print(f"{role}: peak {used / GIB:.2f} GiB of {limit / GIB:.2f}, weights {weights[role] / GIB:.2f}")
        assert used <= limit, role
