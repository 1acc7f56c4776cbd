from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tessera.checkpoint import loading as tensor_files
from tessera.checkpoint.loading import TensorReader
from tessera.checkpoint.safetensors import StoredTensor
from tessera.errors import CheckpointError, ConfigError
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision
from tessera.nn.loading import load_text
from tessera.nn.text import TextTower
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(path: Path, dtype: str) -> tuple[LlamaNemotronVision, TextTower]:
    model = LlamaNemotronVL(path)
    vision = model.load_vision(dtype=dtype, device="cpu")
    assert isinstance(vision, LlamaNemotronVision)
    return vision, load_text(model.config.text, model.tensors(), part="text.", dtype=dtype, device="cpu")


def nbytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_type_to_every_type(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, stored: str, wanted: str
) -> None:
    monkeypatch.setattr(tensor_files, "_MAPPED_BYTES", 4096)  # so that the file is mapped several times
    path = make_checkpoint(dtype=stored)
    vision, text = load(path, wanted)
    own_name = LlamaNemotronVL(path).stored_name
    weights = {own_name(name): value for name, value in load_file(path / "model.safetensors").items()}
    parameters = dict(vision.named_parameters()) | {f"text.{k}": v for k, v in text.named_parameters()}
    assert all(parameter.dtype == DTYPES[wanted] for parameter in parameters.values())
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in parameters.values())

    def same(name: str, *sources: str) -> None:
        expected = torch.cat([weights[source] for source in sources]).to(DTYPES[wanted])
        assert torch.equal(parameters[name], expected.view(parameters[name].shape)), name

    same("text.embed_tokens.weight", "text.embed_tokens.weight")
    same("vision.patches.projection.weight", "vision.embeddings.patch_embedding.weight")
    same("vision.positions.weight", "vision.embeddings.position_embedding.weight")
    same("projector.norm.weight", "projector.0.weight")
    same("projector.linear_1.weight", "projector.1.weight")
    same("projector.linear_2.bias", "projector.3.bias")
    own, stored = "vision.layers.1.", "vision.encoder.layers.1."
    same(f"{own}self_attn.qkv_proj.bias", *(f"{stored}self_attn.{part}_proj.bias" for part in "qkv"))
    same(f"{own}self_attn.o_proj.weight", f"{stored}self_attn.out_proj.weight")
    same(f"{own}input_layernorm.bias", f"{stored}layer_norm1.bias")
    same(f"{own}post_attention_layernorm.bias", f"{stored}layer_norm2.bias")
    same(f"{own}mlp.up_proj.weight", f"{stored}mlp.fc1.weight")
    same(f"{own}mlp.down_proj.weight", f"{stored}mlp.fc2.weight")
    attention = "text.layers.0.self_attn."
    same(f"{attention}qkv_proj.weight", *(f"{attention}{part}_proj.weight" for part in "qkv"))
    mlp = "text.layers.1.mlp."
    same(f"{mlp}gate_up_proj.weight", f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")


@pytest.mark.parametrize("select_layer", [-1, -2, 0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_as_announced(make_checkpoint: MakeCheckpoint, dtype: str, select_layer: int) -> None:
    path = make_checkpoint(select_layer=select_layer)
    model = LlamaNemotronVL(path)
    vision, text = load(path, dtype)
    assert nbytes(vision) == model.vision_nbytes(dtype)
    assert nbytes(text) == model.text_nbytes(dtype)


def test_shards_load_the_same(make_checkpoint: MakeCheckpoint) -> None:
    for one, other in zip(
        load(make_checkpoint(), "float32"), load(make_checkpoint(shards=3), "float32"), strict=True
    ):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_each_side_reads_only_its_own_tensors(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaNemotronVL(make_checkpoint())
    read: list[str] = []
    original = TensorReader.read

    def spy(self: TensorReader, tensor: StoredTensor, into: torch.Tensor) -> None:
        read.append(tensor.name)
        original(self, tensor, into)

    monkeypatch.setattr(TensorReader, "read", spy)
    model.load_vision(dtype="float32", device="cpu")
    assert {name.split(".")[0] for name in read} == {"vision_model", "mlp1"}
    assert not any(".head." in name for name in read)
    read.clear()
    model.load_text(dtype="float32", device="cpu")
    assert {name.split(".")[0] for name in read} == {"language_model"}


def test_unknown_type(small: LlamaNemotronVL) -> None:
    with pytest.raises(ConfigError, match="dtype 'int8' is none of"):
        small.load_text(dtype="int8", device="cpu")


def test_a_file_that_shrinks(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(make_checkpoint(), tmp_path / "shrinking"))
    read = TensorReader.read

    def shrinks(self: TensorReader, tensor: StoredTensor, into: torch.Tensor) -> None:
        os.truncate(tensor.file, tensor.file.stat().st_size - 1)
        read(self, tensor, into)

    monkeypatch.setattr(TensorReader, "read", shrinks)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not readable"):
        LlamaNemotronVL(path).load_text(dtype="float32", device="cpu")


@pytest.mark.starts
def test_loading_imports_no_compiler(make_checkpoint: MakeCheckpoint) -> None:
    """It would take as long as all the rest of a worker's start."""
    code = """
import sys
from pathlib import Path
from tessera.models import open_model
model = open_model(Path(sys.argv[1]))
for load in (model.load_vision, model.load_text):
    load(dtype="float32", device="cpu")
sys.exit("torch._dynamo" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(make_checkpoint())]
    assert subprocess.run(command, check=False, timeout=180).returncode == 0
