"""The text stages for compilers: exported in the padded layout, they compute what the module does.

Of the packed one `tests/engine/test_carried.py` has every family.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tessera.engine.batch import tensors
from tessera.errors import ConfigError
from tessera.models import open_model
from tessera.models.base import Model
from tessera.models.llama_nemotron_vl.model import LlamaNemotronRerankVL
from tessera.models.stages import StageFamily
from tessera.models.tower import TowerModel
from tessera_engines.aoti.text import PaddedModule
from tessera_engines.compiled.export import example_inputs, export_stage
from tessera_engines.compiled.spec import Profile, Range, Stage, axis_ranges
from tessera_engines.compiled.stages import load_stage
from tessera_engines.networks import networks_of
from tessera_engines.networks.llama_nemotron_vl import describe_network
from tessera_tools.random_checkpoint.llama import TINY as LLAMA
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY, RERANK_TINY
from tessera_tools.random_checkpoint.llama_rerank import TINY as RERANK
from tessera_tools.random_checkpoint.ministral3 import TINY as NEMOTRON_3
from tessera_tools.random_checkpoint.qwen3 import TINY, VL_TINY
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_embed import cases as llama
from tests.models.llama_nemotron_rerank import cases as rerank
from tests.models.llama_nemotron_rerank_vl import cases as rerank_vl
from tests.models.qwen3_embedding import cases as embedding
from tests.models.running import batch_of, cosines, error, preprocessed, vectors

SMALL = {"image_size": 64, "base_vocab": 600}
PROFILE = Profile(
    sequences=Range(1, 4, 16), tokens=Range(1, 256, 2048), rows=Range(1, 64, 512), units=Range(1, 64, 2048)
)


class Program(torch.nn.Module):
    """An exported program, called as an engine calls a compiled one."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.module = exported.module()

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.module(*given)


def compared(model: Model, inputs: list) -> tuple[np.ndarray, np.ndarray]:
    """What the exported stage computes in the padded layout, and what the module does."""
    stage = model.load_stage("text", layout="padded", dtype="float32", device="cpu")
    program = Program(export_stage(stage, axis_ranges([PROFILE]), device="cpu"))
    vision = model.load_vision(dtype="float32", device="cpu") if model.vision else None
    text = model.load_text(dtype="float32", device="cpu")
    batch = batch_of(model, vision, inputs)
    assert isinstance(model, TowerModel)
    width = model.text.row_width
    run = PaddedModule(program, 16, width)
    found = run(tensors(batch, torch.cat(batch.vision) if batch.vision else torch.empty(0, width)))
    return found.numpy(), vectors(model, text, batch)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("spec", "cases"), [(TINY, embedding.CASES[:6]), (LLAMA, llama.CASES[:6]), (NEMOTRON_3, llama.CASES[:6])]
)
def test_text_alone(written: WriteCheckpoint, spec: Spec, cases: list) -> None:
    assert cosines(*compared(open_model(written(spec)), cases)).min() >= 0.999999


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("spec", "cases"), [(RERANK, rerank.CASES), (replace(RERANK_TINY, **SMALL), rerank_vl.CASES)]
)
def test_scores(written: WriteCheckpoint, spec: Spec, cases: list) -> None:
    found, expected = compared(open_model(written(spec)), cases)
    assert found.shape == (len(cases), 1)
    assert error(found, expected) <= 1e-4


@torch.inference_mode()
def test_a_score_from_pixels_in_one_stage(written: WriteCheckpoint) -> None:
    model = open_model(written(replace(RERANK_TINY, **SMALL)))
    assert isinstance(model, LlamaNemotronRerankVL)
    pair = rerank_vl.CASES[5]
    batch = batch_of(model, model.load_vision(dtype="float32", device="cpu"), [pair])
    (tiles,) = preprocessed(model, [pair]).values()
    ids = torch.from_numpy(batch.input_ids)[None]
    stage = load_stage(model, "fused", layout="padded", dtype="float32", device="cpu")
    scores, norms = stage.module(torch.from_numpy(tiles.values)[None], ids, torch.ones_like(ids))
    assert norms.tolist() == [1.0]
    text = model.load_text(dtype="float32", device="cpu")
    assert np.abs(scores.numpy() - vectors(model, text, batch)).max() <= 1e-4


@pytest.mark.parametrize("stage", ["text", "embed", "fused"])
def test_vectors_of_tokens_have_no_padded_layout(written: WriteCheckpoint, stage: str) -> None:
    model = open_model(written(replace(COLEMBED_TINY, **SMALL)))
    assert isinstance(model, StageFamily)
    with pytest.raises(ConfigError, match="llama_nemotron_colembed_vl has no padded layout"):
        load_stage(model, stage, layout="padded", dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(RERANK_TINY, **SMALL), "llama_nemotron_rerank_vl gives a score, and TensorRT's stage text"),
        (replace(COLEMBED_TINY, **SMALL), "llama_nemotron_colembed_vl gives a vector of each token, and"),
        (RERANK, "family llama_nemotron_rerank describes no networks"),
    ],
)
def test_no_network_of_tensorrt_ends_in_it(written: WriteCheckpoint, spec: Spec, words: str) -> None:
    model = open_model(written(spec))
    with pytest.raises(ConfigError, match=words):
        networks_of(model, Stage.TEXT)
    if model.vision is not None:
        assert networks_of(model, Stage.VISION) is describe_network


@pytest.mark.parametrize(
    ("stage", "layout", "words"),
    [
        ("text", "padded", "family qwen3_vl_embedding has no padded layout"),
        ("vision", "packed", "stage 'vision' is none of text"),
        ("fused", "padded", "stage 'fused' is none of text"),
    ],
)
def test_what_there_is_not(written: WriteCheckpoint, stage: str, layout: str, words: str) -> None:
    model = open_model(written(VL_TINY))
    with pytest.raises(ConfigError, match=words):
        load_stage(model, stage, layout=layout, dtype="float32", device="cpu")


def test_inputs_to_tune_for_are_a_batch_that_can_be_pooled(written: WriteCheckpoint) -> None:
    """Each sequence has a token: the one that is pooled here would else be the one before the first."""
    model = open_model(written(VL_TINY))
    stage = load_stage(model, "text", layout="packed", dtype="float32", device="cpu")
    ranges = axis_ranges([PROFILE])
    for own in (ranges, {axis: Range(1, 1, sizes.max) for axis, sizes in ranges.items()}):
        with torch.inference_mode():
            vectors, _ = stage.module(*example_inputs(stage, own, device="cpu"))
        assert torch.isfinite(vectors).all()
