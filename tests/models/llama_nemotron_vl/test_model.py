from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import Model
from tessera.models.llama_nemotron_vl.model import FAMILY, LlamaNemotronVL
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint
from tests.models.llama_nemotron_vl.test_preprocess import encoded, gradient

WITHOUT_TORCH = """
import sys
from tessera.imaging import Picture
from tessera.models import Role, Truncate, open_model
from tessera.models.base import Content

model = open_model(sys.argv[1])
options = dict(max_tokens=model.max_tokens, truncate=Truncate.END, param="input")
plan = model.plan(90, 40, param="input")
prompt = model.prompt(Content(parts=("some text", plan), role=Role.PASSAGE), **options)
pixels = model.preprocess(Picture(sys.stdin.buffer.read(), param="input"))
assert pixels.plan == plan and model.positions(prompt.tokens, [plan]).shape == (1, len(prompt.tokens))
assert len(model.vision_index(prompt.tokens)) == plan.rows
model.fingerprint, model.dimensions, model.vision_nbytes("bfloat16"), model.text_nbytes("float32")
loaded = {"torch", "transformers", "safetensors"} & set(sys.modules)
assert not loaded, loaded
"""


def test_properties(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(dimensions=(32, 64, 128))
    model: Model = open_model(path)
    assert isinstance(model, LlamaNemotronVL)
    assert model.family == FAMILY.name == "llama_nemotron_vl"
    assert model.path == path.resolve()
    assert (model.output.width, model.vocab_size, model.max_tokens) == (128, 626, 10240)
    assert (model.config.tokens_per_tile, model.vision.max_units, model.vision.unit_shape) == (
        4,
        7,
        (3, 64, 64),
    )
    assert model.dimensions == {32, 64}
    assert model.fingerprint == open_model(path).fingerprint
    assert model.vision_nbytes("float32") == 2 * model.vision_nbytes("bfloat16")
    assert model.text_nbytes("float32") == 2 * model.text_nbytes("float16")


def test_everything_but_the_weights_does_without_torch(make_checkpoint: MakeCheckpoint) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(make_checkpoint())],
        input=encoded(gradient()),
        check=True,
        timeout=180,
    )


def test_opening_does_not_need_the_weights(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(make_checkpoint(), path, ignore=shutil.ignore_patterns("*.safetensors"))
    model = open_model(path)
    with pytest.raises(CheckpointError, match="has neither"):
        model.load_text(dtype="float32", device="cpu")
    with pytest.raises(CheckpointError, match="has neither"):
        _ = model.fingerprint
