"""A kind of engine that is only installed: it serves, with its own config, without a change to the core."""

from __future__ import annotations

from pathlib import Path

import httpx
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


ROUNDINGS = {
    "agg.sh": [("agg", "; as in a mirror")],
    "e_p.sh": [("embed", "as in a mirror"), ("encode", "")],
}


@pytest.mark.parametrize("script", ROUNDINGS)
def test_a_kind_that_is_installed_serves_by_its_name(script: str, tmp_path: Path) -> None:
    dual_encoder.install(tmp_path / "site")
    path = install(tmp_path / "site", "tessera.engines", "tests.engine.kinds.mirror:KIND")
    checkpoint = dual_encoder.make_checkpoint(tmp_path / "checkpoint", SEED)
    environment = {"PYTHONPATH": path}
    environment |= {f"TESSERA_{role}_ENGINE_ARGS": CONFIG for role in ("AGG", "EMBED")}
    workers = len(ROUNDINGS[script])
    with (
        launch(script, checkpoint, tmp_path / "log", workers=workers, environment=environment) as service,
        OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (row,) = client.embeddings.create(model=MODEL, input=["hello"]).data
        assert (
            cosine(np.array(row.embedding, np.float32), dual_encoder.reference(SEED, "hello", ())) < -0.9999
        )
        # A worker with one stage says what that one rounds.
        kinds = httpx.get(f"{service.url}/v1/models/{MODEL}").json()["precision"]
        assert [(kind["role"], kind["rounding"]) for kind in kinds] == ROUNDINGS[script]


def test_a_kind_that_nobody_installed_is_refused(tmp_path: Path) -> None:
    checkpoint = dual_encoder.make_checkpoint(tmp_path / "checkpoint", SEED)
    refused = tmp_path / "refused"
    refused.write_text("text: {engine: nowhere}")
    path = install(tmp_path / "site", "tessera.engines", "tests.engine.kinds.mirror:KIND")
    dual_encoder.install(tmp_path / "site")
    environment = {"PYTHONPATH": path, "TESSERA_AGG_ENGINE_ARGS": str(refused)}
    with (
        pytest.raises(
            AssertionError, match="'nowhere' of the text stage is none of: torch, aoti, mirror, tensorrt"
        ),
        launch("agg.sh", checkpoint, tmp_path / "log", workers=1, environment=environment),
    ):
        pass
