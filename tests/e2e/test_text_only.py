"""A model that reads text alone, behind both launch scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tessera.tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, ROOT, Service, launch

pytestmark = pytest.mark.service

TEXTS = ["a yellow heart", "two cats on a sofa", "the sum of the first ten primes"]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "text"
    write_checkpoint(["--out", str(path), "--family", "qwen3_embedding", "--size", "tiny"])
    return path


@pytest.fixture(scope="module", params=["e_p.sh", "agg.sh"])
def service(
    request: pytest.FixtureRequest, text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("log") / request.param
    # Two ports: one for the encode worker that is not to be there.
    with launch(request.param, text_model, log, workers=2) as running:
        yield running


def embed(service: Service, **body: object) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/embeddings", json={"model": MODEL, **body}, timeout=60)


def test_it_embeds_texts(service: Service) -> None:
    answers = [embed(service, input=TEXTS).json()["data"] for _ in range(2)]
    vectors = np.array([[entry["embedding"] for entry in answer] for answer in answers])
    np.testing.assert_allclose(np.linalg.norm(vectors[0], axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert abs(vectors[0] @ vectors[0].T - np.eye(3)).max() < 0.999


def test_no_encode_worker_is_started_and_one_line_says_so(service: Service) -> None:
    said = service.log.read_text()
    assert "encode worker" not in said.replace("no encode workers are started", "")
    assert said.count("reads text alone: no encode workers are started") == int("e_p.sh" in str(service.log))
    assert "qwen3_embedding reads text alone: no vision stage, no cache of vision rows" in said
    assert "cache of vision rows  " not in said and "vision weights" not in said


def test_images_are_refused_by_name(service: Service, photos: dict[str, bytes]) -> None:
    answer = embed(service, input=[parts("x", photos["flower"])])
    assert answer.status_code == 400, answer.text
    assert "input[0]" in answer.text


def test_metrics_have_no_vision_stage(service: Service) -> None:
    page = httpx.get(f"http://127.0.0.1:{service.worker_ports[0]}/metrics").text
    assert "tessera_tokens_in_flight" in page
    assert "tessera_units_in_flight" not in page and "tessera_embedding_cache" not in page


def test_an_encode_worker_for_it_does_not_start(text_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tessera.worker", "--model-path", str(text_model)),
            *("--disaggregation-mode", "encode"),
        ],
        capture_output=True,
        text=True,
        env={"DYN_FILE_KV": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if " ERROR " in line]
    assert len(errors) == 1 and "reads text alone and needs no encode worker" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_host_of_encode_workers_alone_has_nothing_to_start(text_model: Path, tmp_path: Path) -> None:
    numbers = {"FRONTENDS": "0", "ENCODE_WORKERS": "2", "EMBED_WORKERS": "0"}
    done = subprocess.run(
        [str(ROOT / "launch" / "e_p.sh")],
        capture_output=True,
        text=True,
        env=os.environ | numbers | {"MODEL_PATH": str(text_model), "TMPDIR": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode == 1
    assert "reads text alone: there is nothing to start here" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
