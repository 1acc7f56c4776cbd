"""A family that is only installed, not built in, is served by every process without a change to any."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest
from openai import OpenAI

from tests.e2e.inputs import cosine, parts
from tests.e2e.service import MODEL, ROOT, Service, launch
from tests.families.dual_encoder import reference

pytestmark = pytest.mark.e2e

SEED = 7


@pytest.fixture(scope="module", params=[("agg.sh", 1), ("e_p.sh", 2)], ids=["agg", "e_p"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    script, workers = request.param
    folder = tmp_path_factory.mktemp("family")
    # What pip would write for a package that declares the entry point.
    metadata = folder / "site" / "dual_encoder-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dual-encoder\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[tessera.models]\ndual_encoder = tests.families.dual_encoder:FAMILY\n"
    )
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "test_dual_encoder", "seed": SEED}))
    path = os.pathsep.join((str(folder / "site"), str(ROOT)))
    with launch(
        script, checkpoint, folder / "log", workers=workers, environment={"PYTHONPATH": path}
    ) as running:
        yield running


def test_text_images_and_both(service: Service, photos: dict[str, bytes]) -> None:
    china, flower = photos["china"], photos["flower"]
    wanted = [("hello", ()), ("", (china,)), ("a flower", (flower,)), ("both", (china, flower))]
    inputs = [parts(text or None, *images) if images else text for text, images in wanted]
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):
            answer = client.embeddings.create(model=MODEL, input=inputs)
            for row, (text, images) in zip(answer.data, wanted, strict=True):
                assert cosine(np.array(row.embedding, np.float32), reference(SEED, text, images)) > 0.9999
        assert answer.usage.model_dump()["prompt_tokens_details"]["cached_tokens"] == 4
