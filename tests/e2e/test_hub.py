"""A service of a model that is downloaded: started by its hub's name, and what it says of that."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from benchmarks.proc import children

from tests.checkpoint.local_hub import COMMIT, REPOSITORY, files_of, local_hub
from tests.e2e.service import launch
from tests.proc import command_line, environment

TOKEN = "hf_notToBeSeenAnywhere"


@pytest.mark.service
def test_a_private_model_is_downloaded_and_served(checkpoint: Path, tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    with local_hub(files_of(checkpoint)) as hub:
        hub.token = TOKEN
        settings = hub.environment(cache) | {
            "HF_TOKEN": TOKEN,
            "TESSERA_MODEL_PATH": f"{REPOSITORY}@main",
            "TESSERA_SERVED_MODEL_NAME": "",
        }
        with launch("agg.sh", checkpoint, log, workers=1, environment=settings) as service:
            source = {"repository": REPOSITORY, "revision": "main", "commit": COMMIT, "cached": None}
            (card,) = httpx.get(f"{service.url}/v1/models").json()["data"]
            assert (card["id"], card["source"]) == (REPOSITORY, source)
            status = httpx.get(f"{service.url}/status")
            assert status.json()["source"] == source
            metadata, manifest = (httpx.get(f"{service.url}/v1/{name}") for name in ("metadata", "manifest"))
            assert metadata.json()["modelInfo"] == [
                {"shortName": f"{REPOSITORY}:{COMMIT}", "modelUrl": f"hf://{REPOSITORY}@{COMMIT}"}
            ]
            assert f"commit: {COMMIT}" in manifest.json()["manifest_file"]
            # NVIDIA's clients ask so whether a key is good, and send one where none is asked for.
            probe = {
                "json": {"input": [], "model": REPOSITORY},
                "headers": {"authorization": "Bearer nvapi-x"},
            }
            assert httpx.post(f"{service.url}/v1/embeddings", **probe).status_code == 400
            body = {"model": REPOSITORY, "input": "a yellow heart"}
            assert httpx.post(f"{service.url}/v1/embeddings", json=body).status_code == 200
            pids = [service.script.pid, *children(service.script.pid)]
            words = [word for pid in pids for word in command_line(pid)]
            assert len(pids) == 3 and str(cache) in " ".join(words)
            for pid in pids[1:]:
                variables = environment(pid)
                assert variables and not any(TOKEN in value for value in variables.values())
    said = log.read_text()
    assert f"serving {REPOSITORY} at commit {COMMIT} (main)" in said
    assert sum(line.startswith("GET") and line.endswith("model.safetensors") for line in hub.asked) == 1
    for text in (said, status.text, metadata.text, manifest.text, *words):
        assert TOKEN not in text
    assert str(cache) not in metadata.text + manifest.text
