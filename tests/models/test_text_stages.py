"""The text stages of the families for compilers: exported, they compute what the module does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.engine.aoti.text import PackedModule, PaddedModule
from tessera.engine.compiled.export import export_stage
from tessera.engine.compiled.spec import Profile, Range, axis_ranges
from tessera.errors import ConfigError
from tessera.models import open_model
from tessera.models.base import Model
from tessera.tools.random_checkpoint.checkpoint import Spec
from tessera.tools.random_checkpoint.llama import TINY as LLAMA
from tessera.tools.random_checkpoint.qwen3 import TINY, VL_TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_embed import cases as llama
from tests.models.qwen3_embedding import cases as embedding
from tests.models.qwen3_vl_embedding import cases as vl
from tests.models.running import batch_of, cosines, vectors

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


def compared(model: Model, inputs: list, layout: str) -> np.ndarray:
    stage = model.load_stage("text", layout=layout, dtype="float32", device="cpu")
    program = Program(export_stage(stage, axis_ranges([PROFILE]), device="cpu"))
    vision = model.load_vision(dtype="float32", device="cpu") if model.vision else None
    text = model.load_text(dtype="float32", device="cpu")
    batch = batch_of(model, vision, inputs)
    width = model.vision.row_width if model.vision else model.output.width
    run = (PackedModule if layout == "packed" else PaddedModule)(program, 16, width)
    found = run(
        torch.from_numpy(batch.input_ids),
        torch.from_numpy(batch.positions),
        torch.from_numpy(batch.cu_seqlens),
        batch.lengths,
        torch.cat(batch.vision) if batch.vision else torch.empty(0, width),
        torch.from_numpy(batch.vision_index),
    )
    return cosines(found.numpy(), vectors(model, text, batch))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("spec", "cases"), [(TINY, embedding.CASES[:6]), (LLAMA, llama.CASES[:6])])
def test_text_alone(written: WriteCheckpoint, spec: Spec, cases: list, layout: str) -> None:
    assert compared(open_model(written(spec)), cases, layout).min() >= 0.999999


def test_images_with_levels_and_three_axes(written: WriteCheckpoint) -> None:
    inputs = list(vl.CASES.values())
    assert compared(open_model(written(VL_TINY)), inputs[:8], "packed").min() >= 0.999999


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
        model.load_stage(stage, layout=layout, dtype="float32", device="cpu")
