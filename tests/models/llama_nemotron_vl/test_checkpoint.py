from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.weights import weight_files
from tessera.errors import CheckpointError
from tessera.models.llama_nemotron_vl.config import read_config
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.llama_nemotron_vl.tensors import expected
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint

Weights = dict[str, torch.Tensor]


@pytest.fixture
def rewritten(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint whose tensors were edited."""

    def rewrite(edit: Callable[[Weights], None]) -> Path:
        source = make_checkpoint()
        for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((source / name).read_bytes())
        weights = load_file(source / "model.safetensors")
        edit(weights)
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    return rewrite


def names(path: Path) -> set[str]:
    return set(LlamaNemotronVL(path).tensors())


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_tensor_is_found_once(make_checkpoint: MakeCheckpoint, shards: int) -> None:
    path = make_checkpoint(shards=shards)
    assert len(weight_files(path)) == shards
    assert names(path) == set(expected(read_config(path)))


@pytest.mark.parametrize("text", ["language_model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("vision", ["vision_model.vision_model.", "vision_model.", "model.vision_model."])
def test_spellings_of_the_prefixes(make_checkpoint: MakeCheckpoint, vision: str, text: str) -> None:
    path = make_checkpoint(
        vision_prefix=vision,
        text_prefix=text,
        projector_prefix="model.mlp1." if vision.startswith("model.") else "mlp1.",
    )
    assert names(path) == set(expected(read_config(path)))


def test_unused_tensors_are_skipped(rewritten: Callable[..., Path]) -> None:
    def edit(weights: Weights) -> None:
        weights["language_model.lm_head.weight"] = torch.zeros(3)
        weights["lm_head.weight"] = torch.zeros(3)
        weights["language_model.rotary_emb.inv_freq"] = torch.zeros(3)
        weights["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
        weights["vision_model.vision_model.embeddings.position_ids"] = torch.zeros(3, dtype=torch.int64)

    path = rewritten(edit)
    assert names(path) == set(expected(read_config(path)))


def test_missing(rewritten: Callable[..., Path]) -> None:
    path = rewritten(lambda weights: weights.pop("language_model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'text\.layers\.1\.mlp\.up_proj\.weight' of shape \[256, 128\] is missing from model",
    ):
        names(path)


@pytest.mark.parametrize(
    "name",
    ["language_model.layers.2.mlp.up_proj.weight", "score.weight", "vision_model.encoder.layers.0.extra"],
)
def test_unexpected(rewritten: Callable[..., Path], name: str) -> None:
    path = rewritten(lambda weights: weights.update({name: torch.zeros(2, 3)}))
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: unexpected tensor '{name}' of shape \[2, 3\]"
    ):
        names(path)


def test_wrong_shape(rewritten: Callable[..., Path]) -> None:
    path = rewritten(lambda weights: weights.update({"mlp1.1.bias": torch.zeros(64)}))
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: tensor 'mlp1\.1\.bias' must have shape \[128\], found \[64\]",
    ):
        names(path)


def test_wrong_type(rewritten: Callable[..., Path]) -> None:
    path = rewritten(lambda weights: weights.update({"mlp1.1.bias": torch.zeros(128, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"'mlp1\.1\.bias' must be one of .*, found I32"):
        names(path)


def test_the_same_tensor_twice(rewritten: Callable[..., Path]) -> None:
    path = rewritten(lambda weights: weights.update({"model.mlp1.1.bias": torch.zeros(128)}))
    with pytest.raises(
        CheckpointError, match=r"'(model\.)?mlp1\.1\.bias' is the same as '(model\.)?mlp1\.1\.bias'"
    ):
        names(path)


def test_pickles_are_not_unpickled(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((make_checkpoint() / name).read_bytes())
    for name in ("model.pt", "model.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="no other weight format is read"):
        names(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: no state of tensors"):
        names(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"mlp1.1.bias": "pytorch_model.bin"}})
    )
    with pytest.raises(CheckpointError, match=r"names .pytorch_model\.bin., which is no safetensors file"):
        names(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors"])
def test_an_index_stays_in_its_directory(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="which is no safetensors file beside it"):
        weight_files(tmp_path)


def test_an_index_that_is_wrong(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(shards=2)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    parsed = json.loads(index.read_text())
    parsed["weight_map"]["mlp1.9.bias"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(parsed))
    with pytest.raises(CheckpointError, match=r"00002.safetensors: lacks tensor 'mlp1\.9\.bias'"):
        weight_files(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"00002\.safetensors, which is not there: 1 of 2 files are missing"
    ):
        weight_files(tmp_path)
