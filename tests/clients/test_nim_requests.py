"""What NVIDIA's clients ask of an embedding NIM, in their own words and sizes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

import tessera
from tests.clients.conftest import ClosedService
from tests.e2e.disaggregated import OTHER_NAME
from tests.e2e.inputs import data_url
from tests.e2e.service import MODEL, ROOT

pytestmark = pytest.mark.service

MOST = 8191
PASSAGES = {"model": MODEL, "encoding_format": "float", "input_type": "passage", "truncate": "END"}


@pytest.mark.large
def test_as_many_inputs_as_their_clients_send(http: httpx.Client) -> None:
    texts = [f"the page {index}" for index in range(MOST)]
    answer = http.post("/v1/embeddings", json=PASSAGES | {"input": texts})
    assert answer.status_code == 200, answer.text[:1000]
    data = answer.json()["data"]
    assert [row["index"] for row in data] == list(range(MOST))
    asked = [0, 4000, MOST - 1]
    alone = http.post("/v1/embeddings", json=PASSAGES | {"input": [texts[index] for index in asked]}).json()
    for index, row in zip(asked, alone["data"], strict=True):
        np.testing.assert_allclose(data[index]["embedding"], row["embedding"], atol=1e-5)
    refused = http.post("/v1/embeddings", json=PASSAGES | {"input": ["a"] * (MOST + 2)})
    assert refused.status_code == 400
    assert f"at most {MOST + 1} inputs" in refused.json()["error"]["message"]


@pytest.mark.parametrize("model", [MODEL, "elsewhere", None])
def test_an_empty_probe_tells_whether_the_key_is_good(
    service: ClosedService, http: httpx.Client, model: str | None
) -> None:
    body: dict[str, Any] = {"input": []} | ({} if model is None else {"model": model})
    answer = http.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    for headers in ({}, {"authorization": "Bearer nvapi-wrong"}):
        assert httpx.post(f"{service.url}/v1/embeddings", json=body, headers=headers).status_code == 401


def test_one_modality_in_a_list_is_that_of_all(http: httpx.Client, photos: dict[str, bytes]) -> None:
    pages = [data_url(photos["flower"])] * 2
    for modality in ("image", ["image"], ["image", "image"]):
        answer = http.post("/v1/embeddings", json=PASSAGES | {"input": pages, "modality": modality})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 2


def test_what_is_served_is_said_in_the_shapes_of_nim(
    http: httpx.Client, service: ClosedService, checkpoint: Path
) -> None:
    said = {name: http.get(f"/v1/{name}") for name in ("metadata", "version", "license", "manifest")}
    assert {answer.status_code for answer in said.values()} == {200}
    metadata, version, licence, manifest = (answer.json() for answer in said.values())
    fingerprint = http.get("/status").json()["fingerprint"]
    assert version == {"release": tessera.__version__, "api": tessera.__version__}
    assert metadata == {
        "assetInfo": [],
        "licenseInfo": licence,
        "modelInfo": [{"shortName": f"{MODEL}:{fingerprint}"}],
        "repository_override": "",
        "version": tessera.__version__,
    }
    content = (ROOT / "LICENSE").read_bytes()
    assert licence["content"].encode() == content
    assert (licence["name"], licence["type"], licence["size"]) == ("Apache-2.0", "file", len(content))
    assert licence["sha"] == hashlib.sha256(content).hexdigest()
    assert manifest.keys() == {"manifest_file", "repository_override"}
    (model,) = yaml.safe_load(manifest["manifest_file"])["models"]
    weights = checkpoint / "model.safetensors"
    assert model == {
        "name": MODEL,
        "names": [MODEL, OTHER_NAME],
        "family": "llama_nemotron_vl",
        "source": None,
        "fingerprint": fingerprint,
        "files": [{"path": weights.name, "size_bytes": weights.stat().st_size}],
    }
    for answer in said.values():
        for hidden in (str(checkpoint), str(service.media), service.key):
            assert hidden not in answer.text
    assert http.get("/v1/metrics").text.startswith("# HELP")
