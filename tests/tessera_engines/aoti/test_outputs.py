"""Compiled text stages that end in a score, or in a vector of each token, behind the engine's seam."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import OutputKind
from tessera_engines.compiled.build import build_engine
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tessera_tools.random_checkpoint.llama_rerank import TINY as RERANK
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.llama_nemotron_colembed_vl import cases as colembed
from tests.models.llama_nemotron_rerank import cases as rerank
from tests.models.running import batch_of, cosines, error, vectors

# The first test waits for the compilers.
pytestmark = [pytest.mark.compiles, pytest.mark.timeout(1800), pytest.mark.xdist_group("aoti")]

PROFILE = Profile(sequences=Range(1, 8, 64), tokens=Range(1, 256, 10240), rows=Range(1, 64, 10240))


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    ("spec", "cases", "layout"),
    [
        (replace(RERANK, hidden=64, heads=2, kv_heads=1, head_dim=32), rerank.CASES, Layout.PADDED),
        (replace(COLEMBED_TINY, image_size=64, base_vocab=600), colembed.CASES, Layout.PACKED),
    ],
)
def test_outputs_are_those_of_torch(spec: Spec, cases: list, layout: Layout, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", spec)
    model = open_model(tmp_path / "model")
    build = BuildSpec(
        stage=Stage.TEXT,
        flavour="aoti",
        dtype="float32",
        layout=layout,
        profiles=(PROFILE,),
        decomposable=layout is Layout.PACKED,
    )
    build_engine(model, build, tmp_path / "engine", progress=print)
    settings = EngineSettings(
        engine="aoti",
        path=tmp_path / "engine",
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
