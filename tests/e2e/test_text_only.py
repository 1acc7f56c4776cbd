"""Models that read text alone, each behind one of the launch scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tessera.models.base import Role
from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.service import MODEL, ROOT, Service, launch
from tests.models.running import Given, cosines
from tests.references.families import reference_of

pytestmark = pytest.mark.service

TEXTS = ["a yellow heart", "two cats on a sofa", "the sum of the first ten primes"]


# What a script makes of such a family depends on what the family says of itself, not on which it is.
SCRIPTS = {"qwen3_embedding": "agg.sh", "llama_nemotron_embed": "e_p.sh"}

Started = tuple[str, Path, Service]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family in SCRIPTS:
        write_checkpoint(["--out", str(folder / family), "--family", family, "--size", "tiny"])
    return {family: folder / family for family in SCRIPTS}


@pytest.fixture(scope="module", params=SCRIPTS.items(), ids=SCRIPTS)
def started(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    family, script = request.param
    log = tmp_path_factory.mktemp("log") / script
    # Two ports: one for the encode worker that is not to be there.
    with launch(script, models[family], log, workers=2) as running:
        yield family, models[family], running


@pytest.fixture
def service(started: Started) -> Service:
    return started[2]


def embed(service: Service, **body: object) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/embeddings", json={"model": MODEL, **body}, timeout=60)


@pytest.mark.parametrize("role", ["query", "passage"])
def test_vectors_are_those_of_the_reference(started: Started, role: str) -> None:
    _, model, service = started
    texts = [*TEXTS, "the river under the bridge by the old temple " * 60]
    answer = embed(service, input=texts, input_type=role).json()["data"]
    reference = reference_of(model)
    expected = [reference.answer(Given(parts=(text,), role=Role(role))) for text in texts]
    found = np.array([entry["embedding"] for entry in answer])
    assert cosines(found, np.stack(expected)).min() >= 0.99999


def test_the_widths_of_the_family(started: Started) -> None:
    family, _, service = started
    width = {"qwen3_embedding": 33, "llama_nemotron_embed": 384}[family]
    whole, cut = (
        np.array(embed(service, input="a yellow heart", **more).json()["data"][0]["embedding"])
        for more in ({}, {"dimensions": width})
    )
    np.testing.assert_allclose(cut, whole[:width] / np.linalg.norm(whole[:width]), atol=1e-6)
    assert embed(service, input="a yellow heart", dimensions=31).status_code == 400


def test_no_encode_worker_is_started_and_one_line_says_so(started: Started) -> None:
    family, _, service = started
    said = service.log.read_text()
    assert "encode worker" not in said.replace("no encode workers are started", "")
    assert said.count("reads text alone: no encode workers are started") == int("e_p.sh" in str(service.log))
    assert f"{family} reads text alone: no vision stage, no cache of vision rows" in said
    assert "cache of vision rows  " not in said and "vision weights" not in said


def test_metrics_have_no_vision_stage(service: Service) -> None:
    page = httpx.get(f"http://127.0.0.1:{service.worker_ports[0]}/metrics").text
    assert "tessera_tokens_in_flight" in page
    assert "tessera_units_in_flight" not in page and "tessera_embedding_cache" not in page


def test_an_encode_worker_for_it_does_not_start(models: dict[str, Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tessera.worker", "--model-path", str(models["qwen3_embedding"])),
            *("--disaggregation-mode", "encode"),
        ],
        capture_output=True,
        text=True,
        env={"DYN_FILE_KV": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=180,
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if " ERROR " in line]
    assert len(errors) == 1 and "reads text alone and needs no encode worker" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_host_of_encode_workers_alone_has_nothing_to_start(models: dict[str, Path], tmp_path: Path) -> None:
    settings = {"TESSERA_FRONTENDS": "0", "TESSERA_ENCODE_WORKERS": "2", "TESSERA_EMBED_WORKERS": "0"}
    settings |= {"TESSERA_MODEL_PATH": str(models["llama_nemotron_embed"]), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [str(ROOT / "launch" / "e_p.sh")],
        capture_output=True,
        text=True,
        env=os.environ | settings,
        timeout=180,
    )
    assert done.returncode == 1
    assert "reads text alone: there is nothing to start here" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
