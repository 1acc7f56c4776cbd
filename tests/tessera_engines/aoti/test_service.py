"""The compiled engines behind the real service: launch script, HTTP, and the reference's vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.inputs import cases, cosine
from tests.e2e.service import MODEL, launch
from tests.references.llama_nemotron_vl import Reference
from tests.tessera_engines.aoti.conftest import CONFIG

# The first test waits for the compilers.
# Not among those that start services: the engines are built once, for these tests and the ones beside them.
pytestmark = [pytest.mark.compiles, pytest.mark.timeout(3900), pytest.mark.xdist_group("aoti")]


def test_served_by_the_aggregated_worker(
    engines: Path, checkpoint: Path, photos: dict[str, bytes], reference: Reference, tmp_path: Path
) -> None:
    config = tmp_path / "aoti.yaml"
    config.write_text(CONFIG.read_text().replace("path: engines/", f"path: {engines}/"))
    inputs = cases(photos)
    environment = {"TESSERA_AGG_ENGINE_ARGS": str(config)}
    with (
        launch("agg.sh", checkpoint, tmp_path / "log", workers=1, environment=environment) as service,
        OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client,
    ):
        # All at once, so that long and short sequences share a batch, then each alone.
        together = client.embeddings.create(model=MODEL, input=[case.value for case in inputs]).data
        for case, row in zip(inputs, together, strict=True):
            alone = client.embeddings.create(model=MODEL, input=[case.value]).data[0]
            expected = case.expected(reference)
            for vector in (row.embedding, alone.embedding):
                assert cosine(vector, expected) >= 0.9999, case.name
