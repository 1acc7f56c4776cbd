"""A compiled text stage that ends in a vector of each token, behind the engine's seam.

One that ends in a score is in ``tests/engine/test_carried.py``, as it is exported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tests.models.llama_nemotron_colembed_vl.cases import CASES
from tests.models.running import batch_of, cosines, vectors

# The first test waits for the compilers.
pytestmark = [pytest.mark.compiles, pytest.mark.timeout(3900), pytest.mark.xdist_group("aoti")]


def test_vectors_of_tokens_are_those_of_torch(engines: Path, colembed: Path) -> None:
    model = open_model(colembed)
    settings = EngineSettings(
        engine="aoti",
        path=engines / "token vectors",
        device="cpu",
        dtype="float32",
        max_batch_cost=512,
        max_queue_cost=512,
    )
    engine = make_text_engine(model, settings, place(settings))
    batch = batch_of(model, model.load_vision(dtype="float32", device="cpu"), CASES)
    output = engine.launch(batch).result()
    expected = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    assert output.values.shape == expected.shape
    assert cosines(output.values, expected).min() >= 0.99999
    engine.close()
