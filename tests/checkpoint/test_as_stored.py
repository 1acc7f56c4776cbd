"""Checkpoints in FP8 whose weights stay as they are stored, through a family's own loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.loading import as_stored
from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import TextTensors
from tessera.nn.fp8 import values_of
from tessera.nn.text import TextTower
from tests.checkpoint.modelopt import PROJECTIONS, quantise

TOKENS = 11


def loaded(path: Path, *, stored: bool) -> TextTower:
    model = open_model(path)
    if not stored:
        return model.load_text(dtype="float32", device="cpu")  # type: ignore[return-value]
    with as_stored():
        return model.load_text(dtype="float32", device="cpu")  # type: ignore[return-value]


@torch.inference_mode()
def vectors(module: TextTower) -> torch.Tensor:
    return module(
        TextTensors(
            torch.arange(1, TOKENS + 1, dtype=torch.int32),
            torch.arange(TOKENS, dtype=torch.int32)[None],
            torch.tensor([0, TOKENS], dtype=torch.int32),
            [TOKENS],
            torch.empty(0, 1),
            torch.empty(0, dtype=torch.int32),
        )
    )


def test_it_holds_the_bytes_and_scales_of_the_file(checkpoint: Path, tmp_path: Path) -> None:
    path = quantise(checkpoint, tmp_path / "model", static=True)
    module, stored = loaded(path, stored=True), load_file(path / "model.safetensors")
    layer = module.layers.layers[0]
    first = "layers.0.self_attn.q_proj.weight_scale"
    stem = next(name for name in stored if name.endswith(first)).removesuffix("self_attn.q_proj.weight_scale")
    parts = [f"{stem}self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    held = layer.self_attn.qkv_proj.fp8
    assert held is not None and held.input_scale is not None
    values = torch.cat([stored[f"{part}.weight"].view(torch.uint8) for part in parts])
    assert torch.equal(held.values.view(torch.uint8), values)
    scales = [stored[f"{part}.weight_scale"] for part in parts]
    assert len({float(scale) for scale in scales}) == 3, "each tensor has its own"
    expected = torch.cat(
        [scale.expand(len(stored[f"{part}.weight"])) for scale, part in zip(scales, parts, strict=True)]
    )
    assert torch.equal(held.scales, expected)
    # They read the same rows.
    assert float(held.input_scale) == max(float(stored[f"{part}.input_scale"]) for part in parts)
    assert all(linear.fp8 is not None for layer in module.layers.layers for linear in layer.linears)


def test_multiplied_out_is_the_reference_of_weights_alone(checkpoint: Path, tmp_path: Path) -> None:
    """With inputs in FP8 the vector is near, with random weights, and not the same."""
    path = quantise(checkpoint, tmp_path / "model", static=False)
    reference, found = (vectors(loaded(path, stored=stored)) for stored in (False, True))
    cosine = float(torch.cosine_similarity(reference, found))
    assert 0.98 < cosine < 0.999999
    tower = loaded(path, stored=True)
    whole = loaded(path, stored=False)
    for layer, other in zip(tower.layers.layers, whole.layers.layers, strict=True):
        for one, same in zip(layer.linears, other.linears, strict=True):
            assert one.fp8 is not None and torch.equal(one.fp8.multiplied(), same.weight)


@pytest.mark.parametrize(
    ("entry", "out"),
    [
        ("NAME", ("layers.0.self_attn.o_proj",)),
        ("PREFIX", ("layers.1.",)),
        ("WILDCARD", ("down_proj",)),
    ],
)
def test_modules_that_are_left_out_stay_as_they_are(
    checkpoint: Path, tmp_path: Path, entry: str, out: tuple[str, ...]
) -> None:
    """As exporters write it: their entries say it, and their weights are in the checkpoint's own type."""
    entries = {
        "NAME": ["language_model.model.layers.0.self_attn.o_proj"],
        "PREFIX": ["language_model.model.layers.1*"],
        "WILDCARD": ["*.down_proj", "vision_model*", "mlp1*"],
    }[entry]
    path = quantise(checkpoint, tmp_path / "model", static=True, without=out, exclude=entries)
    module = loaded(path, stored=True)
    for number, layer in enumerate(module.layers.layers):
        for name, linear in zip(
            ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), layer.linears, strict=True
        ):
            full = f"layers.{number}.{'self_attn' if name in ('qkv_proj', 'o_proj') else 'mlp'}.{name}"
            assert (linear.fp8 is None) == any(part in f"{full}." for part in out), full
    assert torch.isfinite(vectors(module)).all()


def test_a_product_of_which_one_tensor_is_left_out_is_multiplied_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = quantise(checkpoint, tmp_path / "model", static=True, without=("layers.0.self_attn.k_proj",))
    first, second = loaded(path, stored=True).layers.layers[:2]
    assert first.self_attn.qkv_proj.fp8 is None and second.self_attn.qkv_proj.fp8 is not None


def test_scales_that_cannot_be_are_named(checkpoint: Path, tmp_path: Path) -> None:
    path = quantise(checkpoint, tmp_path / "model", static=True)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.input_scale"))
    for wrong, message in ((torch.tensor(0.0), "must be positive"), (torch.ones(2), "must be one number")):
        save_file(tensors | {name: wrong}, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=message) as raised:
            loaded(path, stored=True)
        assert name in str(raised.value)


COMPRESSED: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize("inputs", [None, {"num_bits": 8, "type": "float", "dynamic": True}])
def test_compressed_tensors_of_weights_alone_are_multiplied_out(
    checkpoint: Path, tmp_path: Path, inputs: dict[str, Any] | None
) -> None:
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(PROJECTIONS) and "vision" not in name]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 448
        tensors[f"{name}_scale"], tensors[name] = scale, values_of(tensors[name], scale)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    group = {"weights": COMPRESSED, "input_activations": inputs, "targets": ["Linear"]}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    for layer in loaded(path, stored=True).layers.layers:
        for linear in layer.linears:
            assert (linear.fp8 is None) == (inputs is None)
            assert linear.fp8 is None or linear.fp8.input_scale is None, "each row has its own"


def test_how_it_is_declared_is_part_of_the_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    path = quantise(checkpoint, tmp_path / "model", static=True)
    before = open_model(path).fingerprint
    about = json.loads((path / "hf_quant_config.json").read_text())
    about["quantization"]["kv_cache_quant_algo"] = "FP8"
    (path / "hf_quant_config.json").write_text(json.dumps(about))
    assert open_model(path).fingerprint != before
