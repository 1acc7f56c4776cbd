"""Quantised weights: each layout against its definition, and against the package that writes some of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.loading import TensorReader
from tessera.checkpoint.quantized import Quantization
from tessera.checkpoint.safetensors import WeightFile
from tessera.checkpoint.weights import stored_tensors
from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import TextTensors
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import TINY as BERT_TINY
from tessera_tools.random_checkpoint.llama import TINY
from tessera_tools.random_checkpoint.qwen3 import VL_RERANK_TINY
from tessera_tools.random_checkpoint.towers import CLIP_TINY, SIGLIP2_TINY, SIGLIP_TINY, TowersSpec
from tests.models import running
from tests.models.qwen3_vl_rerank.cases import CASES as PAIRS
from tests.models.two_towers.cases import CASES

MODELOPT = {"producer": {"name": "modelopt", "version": "0.39.0"}}
# No whole blocks of 128.
ROWS, COLUMNS = 200, 320
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

Tensors = dict[str, torch.Tensor]


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "float", "symmetric": True, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def write(directory: Path, declared: Mapping[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"quantization_config": declared}))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def read(directory: Path) -> Tensors:
    """Every weight of a directory as loading reads it, by the name that it would have unquantised."""
    quantization = Quantization.read(directory)
    assert quantization is not None
    values = {}
    with TensorReader() as reader:
        for name, tensor in quantization.joined(WeightFile.read(directory / "model.safetensors").tensors):
            value = torch.empty(tensor.count)
            reader.read(tensor, value)
            values[name] = value.reshape(tensor.shape)
    return values


def float8(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)


def by_definition(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each value times the scale of its block, which its row and column name."""
    rows, columns = (torch.arange(size) // side for size, side in zip(values.shape, block, strict=True))
    return values * scale[rows[:, None], columns[None]]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize(
    ("declared", "shape", "block"),
    [
        (modelopt("FP8"), (), (ROWS, COLUMNS)),
        (modelopt("fp8_per_channel_per_token"), (ROWS,), (1, COLUMNS)),
        (modelopt("FP8_PB_WO"), (2, 3), (128, 128)),
        (modelopt("FP8_PB_WO"), (2, 1, 3, 1), (128, 128)),
        (compressed("float-quantized", num_bits=8, strategy="tensor"), (1,), (ROWS, COLUMNS)),
        (compressed("float-quantized", num_bits=8, strategy="channel"), (ROWS, 1), (1, COLUMNS)),
        (compressed("float-quantized", num_bits=8, block_structure=[64, 128]), (4, 3), (64, 128)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (2, 3), (128, 128)),
        ({"quant_method": "fp8", "weight_block_size": None}, (), (ROWS, COLUMNS)),
    ],
)
def test_values_are_multiplied_by_the_scale_of_their_block(
    tmp_path: Path, declared: dict[str, Any], shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    values, scale = float8(), torch.rand(shape) + 0.1
    name = "weight_scale_inv" if declared["quant_method"] == "fp8" else "weight_scale"
    plain = torch.randn(3, 5)
    tensors = {
        "a.weight": values,
        f"a.{name}": scale,
        "a.input_scale": torch.tensor(0.5),
        "a.k_scale": torch.tensor(0.5),
        "a.bias": plain[0].clone(),
        "b.weight": plain,
    }
    weights = read(write(tmp_path / "model", declared, tensors))
    assert weights.keys() == {"a.weight", "a.bias", "b.weight"}
    grid = scale.reshape(math.ceil(ROWS / block[0]), math.ceil(COLUMNS / block[1]))
    assert torch.equal(weights["a.weight"], by_definition(values.float(), grid, block))
    assert torch.equal(weights["b.weight"], plain)


def test_exponents_are_powers_of_two(tmp_path: Path) -> None:
    values = float8()
    exponents = torch.randint(100, 140, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    scale = torch.tensor([[2.0 ** (one - 127) for one in row] for row in exponents.tolist()])
    wanted = by_definition(values.float(), scale, (1, 32))
    for stored in (exponents, exponents.view(torch.float8_e8m0fnu)):
        tensors = {"a.weight": values, "a.weight_scale": stored}
        weights = read(write(tmp_path / "model", modelopt("MXFP8"), tensors))
        assert torch.equal(weights["a.weight"], wanted)


def test_four_bits_are_two_values_a_byte(tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    values = torch.tensor(
        [
            [E2M1[bits & 7] * (-1 if bits & 8 else 1) for byte in row for bits in (byte & 15, byte >> 4)]
            for row in packed.tolist()
        ]
    )
    scale = (torch.rand(ROWS, COLUMNS // 16) * 400).to(torch.float8_e4m3fn)
    overall = torch.tensor(0.003)
    tensors = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": overall}
    weights = read(write(tmp_path / "model", modelopt("NVFP4", group_size=16), tensors))
    assert torch.equal(weights["a.weight"], by_definition(values, scale.float(), (1, 16)) * overall)


def test_layers_of_one_file_have_their_own_algorithms(tmp_path: Path) -> None:
    """Which of them is of which layer, ModelOpt's own file alone may say."""
    eight, scale = float8(), torch.tensor(0.25)
    blocks, grid = float8(), torch.rand(2, 3) + 0.1
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    steps = (torch.rand(ROWS, COLUMNS // 16) * 400).to(torch.float8_e4m3fn)
    tensors = {
        "a.weight": eight,
        "a.weight_scale": scale,
        "b.weight": packed,
        "b.weight_scale": steps,
        "b.weight_scale_2": torch.tensor(0.003),
        "c.weight": blocks,
        "c.weight_scale": grid,
        "d.weight": torch.randn(3, 5),
    }
    layers = {
        "a": {"quant_algo": "FP8"},
        "b": {"quant_algo": "NVFP4", "group_size": 16},
        "c": {"quant_algo": "FP8_PB_WO"},
    }
    directory = write(tmp_path / "whole", modelopt("MIXED_PRECISION", quantized_layers=layers), tensors)
    whole = read(directory)
    assert torch.equal(whole["a.weight"], eight.float() * scale)
    assert torch.equal(whole["c.weight"], by_definition(blocks.float(), grid, (128, 128)))
    alone = read(
        write(tmp_path / "alone", modelopt("NVFP4"), {k: v for k, v in tensors.items() if "b." in k})
    )
    assert torch.equal(whole["b.weight"], alone["b.weight"])
    other = write(tmp_path / "other", modelopt("mixed_precision"), tensors)
    about = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (other / "hf_quant_config.json").write_text(json.dumps(MODELOPT | about))
    assert all(torch.equal(value, whole[name]) for name, value in read(other).items())


DENSE = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
LAYERS = {"weights": {"type": "float", "strategy": "tensor", "num_bits": 8}, "targets": ["Linear"]}
ATTENTION = {"weights": None, "input_activations": {"type": "float"}, "targets": ["LlamaAttention"]}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": MODELOPT | {"quantization": {"quant_algo": "FP8"}}},
        {"quantization_config": MODELOPT | {"quant_algo": "FP8"}},
        {"text_config": {"quantization_config": modelopt("FP8")}},
        {"compression_config": compressed("float-quantized", num_bits=8)},
        {"quantization_config": compressed("float-quantized") | {"sparsity_config": DENSE}},
        {"quantization_config": compressed("float-quantized") | {"quant_method": "compressed_tensors"}},
        {
            "quantization_config": compressed("float-quantized")
            | {"config_groups": {"group_0": LAYERS, "group_1": ATTENTION}}
        },
    ],
    ids=["own", "producer", "text", "early", "dense", "underscore", "attention"],
)
def test_every_place_and_form_of_a_declaration_is_found(tmp_path: Path, config: dict[str, Any]) -> None:
    values, scale = float8(), torch.tensor(0.25)
    directory = write(tmp_path / "model", {}, {"a.weight": values, "a.weight_scale": scale})
    (directory / "config.json").write_text(json.dumps(config))
    assert torch.equal(read(directory)["a.weight"], values.float() * scale)


@pytest.mark.parametrize(
    "declared",
    [
        modelopt("FP8", kv_cache_scheme={"type": "float", "num_bits": 8}),
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
    ],
    ids=["beside weights", "modelopt", "compressed-tensors", "no groups"],
)
def test_scales_of_caches_are_not_read(tmp_path: Path, declared: dict[str, Any]) -> None:
    plain, one = torch.randn(3, 5), torch.tensor(0.5)
    names = ("k_proj.k_scale", "v_proj.v_scale", "q_scale", "k_zero_point", "kv_scale", "k_proj.output_scale")
    tensors = {"a.q_proj.weight": plain, **{f"a.{name}": one.clone() for name in names}}
    assert read(write(tmp_path / "model", declared, tensors)).keys() == {"a.q_proj.weight"}


# The package compiles how it packs.
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [64, 128]}),
        ("nvfp4-pack-quantized", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
    ],
)
def test_it_is_what_compressed_tensors_makes_of_its_own_files(
    tmp_path: Path, layout: str, weights: dict[str, Any]
) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(type="float", symmetric=True, dynamic=False, **weights)
    )
    # The package wants whole blocks.
    plain = torch.randn(256, 384)
    strategy = weights["strategy"]
    block = {"tensor": (256, 384), "channel": (1, 384), "block": (64, 128), "tensor_group": (1, 16)}[strategy]
    largest = 448.0 if weights["num_bits"] == 8 else 6.0
    blocks = plain.reshape(256 // block[0], block[0], -1, block[1])
    scale = blocks.abs().amax(dim=(1, 3)) / largest
    state = {"weight": plain, "weight_scale": scale}
    if strategy == "tensor_group":
        overall = 448.0 / scale.max()
        state |= {"weight_global_scale": overall.reshape(1)}
        state["weight_scale"] = (scale * overall).to(torch.float8_e4m3fn).float()
    elif strategy == "tensor":
        state["weight_scale"] = scale.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    theirs = compressor.decompress(dict(stored), scheme)["weight"].float()
    tensors = {f"a.{name}": value.contiguous() for name, value in stored.items()}
    ours = read(write(tmp_path / "model", compressed(layout, **weights), tensors))["a.weight"]
    # The package computes in bfloat16.
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)
    # Half of the largest step of a type.
    assert (ours - plain).abs().max() <= plain.abs().max() * (0.04 if weights["num_bits"] == 8 else 0.2)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_a_model_is_what_transformers_loads_of_the_same_files(tmp_path: Path, strategy: str) -> None:
    """Written by the package as exporters write it, with a module left out by name."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModel, CompressedTensorsConfig

    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, BERT_TINY)
    shutil.copytree(source, out)
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": strategy, "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    left_out = "encoder.layer.1.output.dense"
    config = QuantizationConfig(
        config_groups={"group_0": group}, format="float-quantized", ignore=[left_out, "pooler.dense"]
    )
    model = AutoModel.from_pretrained(source, dtype=torch.float32)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = module.weight.abs()
            largest = largest.amax(1, keepdim=True) if strategy == "channel" else largest.amax().reshape(1)
            module.weight_scale.data = largest / 448
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="float-quantized")
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
    stored = load_file(out / "model.safetensors")
    assert stored["encoder.layer.0.output.dense.weight"].dtype == torch.float8_e4m3fn
    assert stored[f"{left_out}.weight"].dtype == torch.float32

    theirs = AutoModel.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    ours, plain = (open_model(path).load_text(dtype="float32", device="cpu") for path in (out, source))
    tokens = torch.arange(1, 12, dtype=torch.int32)
    given = TextTensors(
        *(tokens, torch.stack((tokens - 1, torch.zeros_like(tokens))), torch.tensor([0, 11]).int(), [11]),
        *(torch.empty(0, 1), torch.empty(0, dtype=torch.int32)),
    )
    with torch.inference_mode():
        expected = theirs(input_ids=tokens[None].long()).last_hidden_state.mean(1)
        found, other = ours(given), plain(given)
    assert float(torch.cosine_similarity(found, expected)) > 0.99999
    assert float(torch.cosine_similarity(other, expected)) < 0.9999


def test_a_model_is_that_of_its_weights_multiplied_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, TINY)
    stored, multiplied = quantised(source, ("_proj.weight",), in_fp8)
    quantised_path, plain = with_tensors(source, tmp_path / "quantised", stored), tmp_path / "plain"
    with_tensors(source, plain, multiplied)
    # As ModelOpt writes it beside the configuration.
    about = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (quantised_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT | {"quantization": about}))
    ours, theirs, first = (vectors(path) for path in (quantised_path, plain, source))
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, first, atol=1e-3)
    assert len({open_model(path).fingerprint for path in (source, quantised_path, plain)}) == 3


Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight → the tensors that stand for it, by the ends of their names, and their product."""


def in_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.float().abs().amax() / 448
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    of_inputs = torch.tensor(1.0)
    return {"weight": values, "weight_scale": scale, "input_scale": of_inputs}, values.float() * scale


def in_nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows, columns // 16, 16)
    overall = blocks.abs().amax() / (6 * 448)
    scale = (blocks.abs().amax(dim=2) / 6 / overall).to(torch.float8_e4m3fn)
    steps = scale.float()[..., None] * overall
    levels = torch.tensor(E2M1)
    bits = ((blocks / steps).abs()[..., None] - levels).abs().argmin(dim=-1)
    # In the order of the definition: each product is rounded.
    product = (levels[bits] * blocks.sign() * scale.float()[..., None]).reshape(rows, columns) * overall
    bits = (bits + 8 * (blocks < 0)).reshape(rows, columns // 2, 2)
    packed = (bits[..., 0] + 16 * bits[..., 1]).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": overall}, product


def quantised(source: Path, ends: tuple[str, ...], quantise: Quantise) -> tuple[Tensors, Tensors]:
    """The tensors of a checkpoint with weights quantised whose names end so, and with their products."""
    stored: Tensors = {}
    multiplied: Tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        stored[name] = multiplied[name] = value
        if name.endswith(ends):
            parts, multiplied[name] = quantise(value)
            stored |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
    return stored, multiplied


def with_tensors(source: Path, out: Path, tensors: Tensors) -> Path:
    """A checkpoint's other files, with these tensors."""
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


_TOWER_PRODUCTS = tuple(
    f".{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
)


@pytest.mark.parametrize(
    ("algorithm", "quantise"), [("FP8", in_fp8), ("NVFP4", in_nvfp4)], ids=["fp8", "nvfp4"]
)
@pytest.mark.parametrize("spec", [CLIP_TINY, SIGLIP_TINY, SIGLIP2_TINY], ids=lambda spec: spec.model_type)
def test_towers_are_those_of_their_weights_multiplied_out(
    spec: TowersSpec, algorithm: str, quantise: Quantise, tmp_path: Path
) -> None:
    """Both of them: a vision tower that is stored so is read as a text tower is."""
    source, out = tmp_path / "source", tmp_path / "quantised"
    write_checkpoint(source, spec)
    stored, multiplied = quantised(source, _TOWER_PRODUCTS, quantise)
    assert any(name.startswith("vision_model") and name.endswith("_scale") for name in stored)
    with_tensors(source, out, stored)
    declare(out, modelopt(algorithm))
    plain = with_tensors(source, tmp_path / "plain", multiplied)
    ours, theirs, first = (of_towers(path) for path in (out, plain, source))
    assert np.array_equal(ours, theirs)
    assert (np.einsum("ij,ij->i", ours, first) < 0.99999).all()


@pytest.mark.parametrize(
    ("algorithm", "quantise"), [("FP8", in_fp8), ("NVFP4", in_nvfp4)], ids=["fp8", "nvfp4"]
)
def test_logits_of_quantised_embeddings_are_those_of_their_products(
    algorithm: str, quantise: Quantise, tmp_path: Path
) -> None:
    """Of every matrix that a reranker has, and two rows of the embeddings that its logits are tied to."""
    source, out = tmp_path / "source", tmp_path / "quantised"
    write_checkpoint(source, VL_RERANK_TINY)
    ends = ("_proj.weight", "embed_tokens.weight", "attn.qkv.weight", "attn.proj.weight", "_fc2.weight")
    stored, multiplied = quantised(source, ends, quantise)
    with_tensors(source, out, stored)
    declare(out, modelopt(algorithm))
    plain = with_tensors(source, tmp_path / "plain", multiplied)

    def logits(path: Path) -> np.ndarray:
        model = open_model(path)
        vision, text = (load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text))
        return running.vectors(model, text, running.batch_of(model, vision, PAIRS[:5]))

    ours, theirs, first = (logits(path) for path in (out, plain, source))
    assert np.array_equal(ours, theirs)
    assert np.abs(ours - first).max() > 0.1


def test_patches_that_are_stored_in_fp8_are_refused(tmp_path: Path) -> None:
    """A product of four axes: no layout says what a scale of it is for."""
    source, out = tmp_path / "source", tmp_path / "quantised"
    write_checkpoint(source, SIGLIP_TINY)
    stored, _ = quantised(source, ("vision_model.embeddings.patch_embedding.weight",), in_fp8)
    declare(with_tensors(source, out, stored), modelopt("FP8"))
    with pytest.raises(CheckpointError, match="patch_embedding"):
        open_model(out).load_vision(dtype="float32", device="cpu")


def declare(directory: Path, declared: Mapping[str, Any]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": declared}))


def of_towers(path: Path) -> np.ndarray:
    """The unit vectors of texts and images."""
    model = open_model(path)
    vision, text = (load(dtype="float32", device="cpu") for load in (model.load_vision, model.load_text))
    return running.vectors(model, text, running.batch_of(model, vision, CASES))


def vectors(path: Path) -> torch.Tensor:
    model = open_model(path)
    module = model.load_text(dtype="float32", device="cpu")
    tokens = torch.arange(1, 12, dtype=torch.int32)
    with torch.inference_mode():
        return module(
            TextTensors(
                tokens,
                torch.arange(11, dtype=torch.int32)[None],
                torch.tensor([0, 11], dtype=torch.int32),
                [11],
                torch.empty(0, 1),
                torch.empty(0, dtype=torch.int32),
            )
        )


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'; of quantised weights modelopt"),
        (modelopt("W4A8_AWQ"), "quant_algo is 'W4A8_AWQ'; read are FP8"),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT8"}}),
            r"a\.quant_algo is 'INT8'",
        ),
        (compressed("pack-quantized", num_bits=4), "format must be one of"),
        (compressed("float-quantized", type="int"), r"weights\.type must be one of"),
        (compressed("float-quantized", symmetric=False), "symmetric is false"),
        (compressed("float-quantized", strategy="attn_head"), r"weights\.strategy must be one of"),
        (
            compressed("float-quantized") | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config is set",
        ),
        (compressed("float-quantized") | {"transform_config": {"R1": {}}}, "transform_config is set"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be one of"),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(
    tmp_path: Path, declared: dict[str, Any], message: str
) -> None:
    directory = write(tmp_path / "model", declared, {"a.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=message) as raised:
        stored_tensors(directory, {"a.weight": (2, 2)}, lambda name: name)
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": float8()}, "'a.weight' of F8_E4M3 has no 'a.weight_scale'"),
        (
            {"a.weight": float8(), "a.weight_scale": torch.ones(7)},
            r"'a.weight_scale' of shape \[7\] does not",
        ),
        ({"a.weight": float8(), "a.weight_scale": torch.ones(3, 3)}, r"of shape \[3, 3\] does not cover"),
        (
            {"a.weight": float8(), "a.weight_scale": torch.ones(()), "a.weight_scale_2": torch.ones(2)},
            r"'a.weight_scale_2' of shape \[2\] does not cover",
        ),
        ({"a.weight": torch.zeros(ROWS, COLUMNS).to(torch.float8_e5m2)}, "must be one of"),
        ({"a.weight": torch.zeros(ROWS, COLUMNS, dtype=torch.int8)}, "must be one of"),
        ({"a.weight": float8(3, 3), "a.weight_scale": torch.ones(())}, "must have shape"),
        (
            {"a.weight": torch.zeros(ROWS, COLUMNS), "a.weight_scale": torch.ones(())},
            "unexpected tensor 'a.weight_scale'",
        ),
    ],
)
def test_scales_that_are_not_there_or_do_not_fit_are_named(
    tmp_path: Path, tensors: Tensors, message: str
) -> None:
    directory = write(tmp_path / "model", modelopt("FP8"), tensors)
    with pytest.raises(CheckpointError, match=message):
        stored_tensors(directory, {"a.weight": (ROWS, COLUMNS)}, lambda name: name)


def test_bytes_of_a_quantised_weight_are_not_taken_for_its_values(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", modelopt("FP8"), {"a.weight": float8()})
    (directory / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must be one of"):
        stored_tensors(directory, {"a.weight": (ROWS, COLUMNS)}, lambda name: name)


def test_an_adapter_is_added_to_what_was_multiplied_out(tmp_path: Path) -> None:
    from dataclasses import replace

    from tessera.checkpoint.safetensors import LowRank

    values, scale, low = float8(), torch.rand(ROWS, 1), torch.randn(ROWS, 2)
    directory = write(
        tmp_path / "model",
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        {"a.weight": values, "a.weight_scale": scale, "b": low, "c": torch.randn(2, COLUMNS)},
    )
    shapes = {"a.weight": (ROWS, COLUMNS), "b": (ROWS, 2), "c": (2, COLUMNS)}
    found = stored_tensors(directory, shapes, lambda name: name)
    added = replace(found["a.weight"], added=LowRank(b=found["b"], a=found["c"], scale=2.0))
    whole, row = torch.empty(ROWS * COLUMNS), torch.empty(COLUMNS)
    with TensorReader() as reader:
        reader.read(added, whole)
        reader.read(added.row(5), row)
    stored = load_file(directory / "model.safetensors")
    wanted = values.float() * scale + 2 * (low @ stored["c"])
    torch.testing.assert_close(whole.reshape(ROWS, COLUMNS), wanted, rtol=1e-6, atol=1e-5)
    assert torch.equal(row, whole.reshape(ROWS, COLUMNS)[5])
