"""A kind of engine that is only installed: it serves, with its own config, without a change to the core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI

from tests.distribution import install
from tests.e2e.inputs import cosine
from tests.e2e.service import MODEL, launch
from tests.families import dual_encoder

pytestmark = pytest.mark.service

SEED = 7
CONFIG = "test/mirror.yaml"


def test_a_kind_that_is_installed_serves_by_its_name(tmp_path: Path) -> None:
    dual_encoder.install(tmp_path / "site")
    path = install(tmp_path / "site", "tessera.engines", "tests.engine.kinds.mirror:KIND")
    checkpoint = dual_encoder.make_checkpoint(tmp_path / "checkpoint", SEED)
    environment = {"PYTHONPATH": path, "TESSERA_AGG_ENGINE_ARGS": CONFIG}
    with (
        launch("agg.sh", checkpoint, tmp_path / "log", workers=1, environment=environment) as service,
        OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (row,) = client.embeddings.create(model=MODEL, input=["hello"]).data
        assert (
            cosine(np.array(row.embedding, np.float32), dual_encoder.reference(SEED, "hello", ())) < -0.9999
        )
    refused = tmp_path / "refused"
    with pytest.raises(
        AssertionError, match="'nowhere' of the text stage is none of: torch, aoti, mirror, tensorrt"
    ):
        environment["TESSERA_AGG_ENGINE_ARGS"] = str(refused)
        refused.write_text("text: {engine: nowhere}")
        with launch("agg.sh", checkpoint, tmp_path / "log2", workers=1, environment=environment):
            pass
