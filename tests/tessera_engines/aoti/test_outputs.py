"""Compiled text stages that end in a score, or in a vector of each token, behind the engine's seam."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import OutputKind
from tests.models.llama_nemotron_colembed_vl import cases as colembed
from tests.models.llama_nemotron_rerank import cases as rerank
from tests.models.running import batch_of, cosines, error, vectors

# The first test waits for the compilers.
pytestmark = [pytest.mark.compiles, pytest.mark.timeout(3900), pytest.mark.xdist_group("aoti")]


@pytest.mark.parametrize(("name", "cases"), [("score", rerank.CASES), ("token vectors", colembed.CASES)])
def test_outputs_are_those_of_torch(engines: Path, other_models: Path, name: str, cases: list) -> None:
    model = open_model(other_models / name)
    settings = EngineSettings(
        engine="aoti",
        path=engines / name,
        device="cpu",
        dtype="float32",
        max_batch_cost=512,
        max_queue_cost=512,
    )
    engine = make_text_engine(model, settings, place(settings))
    vision = model.load_vision(dtype="float32", device="cpu") if model.vision else None
    batch = batch_of(model, vision, cases)
    output = engine.launch(batch).result()
    expected = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    assert output.values.shape == expected.shape
    if model.output.kind is OutputKind.SCORE:
        assert error(output.values, expected) <= 1e-4
    else:
        assert cosines(output.values, expected).min() >= 0.99999
    engine.close()
