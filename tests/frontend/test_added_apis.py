"""A client's API that is only installed: routes, errors and description come without a change to the core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tessera.frontend.app import APIS
from tests.client_apis import phrases
from tests.distribution import ROOT, install
from tests.e2e.service import launch

SOURCE = ROOT / "components" / "src"
TAKING = """
from tessera.frontend.api.openai import API as OPENAI
from tessera.frontend.service import ClientApi

API = ClientApi("Taking", OPENAI.routes)
"""


@pytest.fixture
def site(tmp_path: Path) -> str:
    return install(tmp_path / "site", "tessera.apis", "tests.client_apis.phrases:API")


@pytest.mark.service
def test_an_installed_api_answers_and_is_described(checkpoint: Path, tmp_path: Path, site: str) -> None:
    log = tmp_path / "log"
    with (
        launch("agg.sh", checkpoint, log, workers=1, environment={"PYTHONPATH": site}) as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        texts = ["a cat", "a yellow heart"]
        answer = http.post("/phrases", json={"phrases": texts})
        assert answer.status_code == 200, answer.text
        asked = http.post("/v1/embeddings", json={"input": texts, "input_type": "query"}).json()
        vectors = [entry["embedding"] for entry in asked["data"]]
        np.testing.assert_allclose(answer.json()["vectors"], vectors, atol=1e-6)

        # In its own shape, also from the middleware.
        refused = http.post("/phrases", json={"phrases": [3]})
        assert (refused.status_code, refused.json()) == (400, {"complaint": "invalid_input"})
        assert http.get("/phrases").json().keys() == {"complaint"}

        described = http.get("/openapi.json").json()["paths"]
        (schema,) = described["/phrases"]["post"]["requestBody"]["content"].values()
        assert schema["schema"] == phrases.FORM.schema
        assert described["/phrases"]["post"]["tags"] == ["Phrases"]
        # Behind the clients' APIs of this distribution, before the routes about the service.
        paths = list(described)
        assert paths.index("/tokenize") < paths.index("/phrases") < paths.index("/health")
        (model,) = http.get("/v1/models").json()["data"]
        assert "/phrases" in model["routes"]


@pytest.mark.service
@pytest.mark.usefixtures("forks")
def test_two_apis_cannot_have_one_path(checkpoint: Path, tmp_path: Path) -> None:
    package = tmp_path / "taking"
    package.mkdir()
    (package / "api.py").write_text(TAKING)
    path = install(tmp_path / "site", "tessera.apis", "api:API")
    ran = subprocess.run(
        [sys.executable, "-m", "tessera.frontend", "--model-path", str(checkpoint), "--port", "0"],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join((str(package), path)),
            "DYN_FILE_KV": str(tmp_path / "discovery"),
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 1
    assert "/v1/embeddings: OpenAI and Taking cannot both answer there" in ran.stderr


def test_openai_is_listed_first_and_the_service_last() -> None:
    clients = ["Cohere", "Voyage", "Text-Embeddings-Inference", "Rerank", "vLLM", "NIM", "vLLM", "Tessera"]
    assert [api.name for api in APIS] == ["OpenAI", *clients, "Health", "NIM", "Health"]


@pytest.mark.parametrize("flags", [(), ("-S",)], ids=["installed", "without an installation"])
def test_a_checkout_has_its_own_apis(flags: tuple[str, ...]) -> None:
    program = "from tessera.siblings import CLIENT_APIS, siblings; print(*siblings(CLIENT_APIS), sep='\\n')"
    ran = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    shown = ran.stdout.splitlines()
    assert [line for line in shown if "tessera_apis.voyage:API" in line]
    modules = {path.stem for path in (SOURCE / "tessera_apis").glob("*.py")} - {"__init__", "scores"}
    assert len(shown) == len(modules)
