"""Options of a model reach every process: a page is shrunk by the frontend and by the decoders alike."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.inputs import parts, scaled
from tests.e2e.service import MODEL, launch

pytestmark = pytest.mark.service


def test_a_page_is_shrunk_to_64_tokens(photos: dict[str, bytes], tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(["--out", str(model), "--family", "qwen3_vl_embedding", "--size", "tiny"])
    environment = {"TESSERA_MODEL_OPTIONS": '{"max_pixels": 65536}', "TESSERA_ENCODE_WORKERS": "1"}
    with launch("e_p.sh", model, tmp_path / "log", workers=2, environment=environment) as service:
        body = {"model": MODEL, "input": [parts("a page", scaled(photos["china"], 1275, 1650))]}
        answer = httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] < 128
        units = service.worker_metric(0, "tessera_batch_units_sum")
        assert 200 < units <= 256
