from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import CheckpointError
from tessera.models.base import Role
from tessera.models.llama_nemotron_vl.config import ModelConfig, read_config
from tessera_tools.random_checkpoint.llama_nemotron_vl import FULL, config_json, processor_json
from tests.models.changing import edit
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint


def write(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content))


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """The published model's two files."""
    write(tmp_path, "config.json", config_json(FULL, "bfloat16"))
    write(tmp_path, "processor_config.json", processor_json(FULL))
    return tmp_path


def changed(directory: Path, name: str, changes: dict[str, Any]) -> ModelConfig:
    """Read after setting dotted keys of one file."""
    edit(directory / name, **changes)
    return read_config(directory)


def test_the_published_model(full: Path) -> None:
    config = read_config(full)
    assert config.tokens_per_tile == 256
    assert config.max_tiles == 7
    assert config.max_tokens == 10240
    assert config.image_token_id == 128258
    assert config.prefixes[Role.QUERY] == "query: "
    assert config.prefixes[Role.PASSAGE] == "passage: "
    assert config.text.vocab_size == 128266
    layer = config.text.layer
    assert (layer.heads, layer.kv_heads, layer.head_dim) == (32, 8, 64)
    assert config.text.rope.rope_type == "llama3"
    assert config.text.rope.theta == 500000.0
    assert config.text.rope.original_max_positions == 8192
    assert config.text.pooling == "mean"
    assert config.vision.layers_used == 27
    assert config.vision.final_norm
    assert config.projector.factor == 2
    assert config.projector.eps == 1e-5
    assert config.dimensions == frozenset()


def test_the_processor_file_wins(full: Path) -> None:
    config = changed(
        full,
        "processor_config.json",
        {"max_input_tiles": 4, "use_thumbnail": False, "query_prefix": "q:", "p_max_length": 3000},
    )
    assert config.image.max_tiles == config.max_tiles == 4
    assert not config.image.thumbnail
    assert config.prefixes[Role.QUERY] == "q: "
    assert config.max_tokens == 3000


def test_what_the_processor_lacks(full: Path) -> None:
    write(full, "processor_config.json", {})
    config = changed(full, "config.json", {"max_dynamic_patch": 3, "dynamic_image_size": None})
    assert config.image.max_tiles == 3  # and not the stale max_input_tiles
    assert not config.image.dynamic
    assert config.max_tiles == 1
    assert config.lacking_keys == ("norm_type",)


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "rope_scaling": None,
            "rope_theta": None,
        },
        {
            "rope_scaling": {
                "type": "llama3",
                "factor": 32,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 8192,
            }
        },
    ],
    ids=["rope_parameters", "type"],
)
def test_spellings_of_rope(full: Path, rope: dict[str, Any]) -> None:
    before = read_config(full).text.rope
    after = changed(full, "config.json", {f"llm_config.{key}": value for key, value in rope.items()})
    assert after.text.rope == before


def test_defaults_of_the_reference_classes(full: Path) -> None:
    config = changed(
        full,
        "config.json",
        {
            "select_layer": None,
            "downsample_ratio": None,
            "ps_version": None,
            "p_max_length": None,
            "vision_config.hidden_act": None,
            "vision_config.patch_size": None,
            "vision_config.num_channels": None,
            "vision_config.layer_norm_eps": None,
            "llm_config.num_attention_heads": None,
            "llm_config.head_dim": None,
            "llm_config.hidden_act": None,
            "llm_config.rope_scaling": None,
            "pooling": None,
        },
    )
    assert config.vision.layer.activation == "gelu_pytorch_tanh"
    assert config.text.layer.head_dim == 64
    assert config.text.rope.rope_type == "default"
    assert config.text.pooling == "mean"
    assert config.max_tokens == 10240


def test_limits_by_positions(full: Path) -> None:
    assert changed(full, "config.json", {"llm_config.max_position_embeddings": 2048}).max_tokens == 2048


def test_feature_layers(full: Path) -> None:
    vision = changed(full, "config.json", {"select_layer": -2}).vision
    assert (vision.layers_used, vision.final_norm) == (26, False)
    vision = changed(full, "config.json", {"select_layer": 27}).vision
    assert (vision.layers_used, vision.final_norm) == (27, False)
    assert changed(full, "config.json", {"select_layer": 0}).vision.layers_used == 0


def test_widths(full: Path) -> None:
    config = changed(full, "config.json", {"matryoshka_dimensions": [512, 1024, 2048]})
    assert config.dimensions == {512, 1024}
    config = changed(full, "config.json", {"matryoshka_dimensions": None, "is_matryoshka": True})
    assert config.dimensions == frozenset(range(1, 2048))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vision_config", None, "vision_config is missing; it must be an object"),
        ("llm_config", [], r"llm_config must be an object, not \[\]"),
        ("llm_config.hidden_size", None, "llm_config.hidden_size is missing; it must be an integer"),
        ("llm_config.hidden_size", "2048", "llm_config.hidden_size must be an integer, not '2048'"),
        ("llm_config.hidden_size", True, "llm_config.hidden_size must be an integer, not True"),
        ("llm_config.num_hidden_layers", 0, "llm_config.num_hidden_layers must be at least 1, not 0"),
        ("llm_config.num_key_value_heads", 5, "multiple of num_key_value_heads 5"),
        ("llm_config.head_dim", 63, "head_dim must be even"),
        ("llm_config.rms_norm_eps", "x", "llm_config.rms_norm_eps must be a number"),
        ("llm_config.rms_norm_eps", -1.0, "llm_config.rms_norm_eps must be positive"),
        ("llm_config.hidden_act", "swish2", "llm_config.hidden_act must be one of"),
        ("llm_config.attention_bias", True, "biases in the backbone are not supported"),
        ("llm_config.is_causal", True, "causal backbones are not supported"),
        ("is_causal", True, "causal backbones are not supported"),
        ("llm_config.mlp_bias", 1, "llm_config.mlp_bias must be true or false"),
        ("llm_config.architectures", ["LlamaModel"], "architectures must be"),
        ("llm_config.rope_scaling.rope_type", "yarn", "rope_scaling.rope_type must be one of"),
        ("llm_config.rope_scaling.factor", None, "rope_scaling.factor is missing"),
        ("llm_config.rope_parameters", {"rope_type": "default"}, "are both there and differ"),
        ("llm_config.partial_rotary_factor", 0.5, "partial_rotary_factor is not supported"),
        ("vision_config.model_type", "clip_vision_model", "vision_config.model_type must be one of"),
        ("vision_config.num_channels", 1, "num_channels must be 3"),
        ("vision_config.patch_size", 15, "image_size must be a multiple of patch_size 15"),
        ("vision_config.num_attention_heads", 7, "multiple of num_attention_heads 7"),
        ("select_layer", 28, "outside the 28 hidden states"),
        ("select_layer", -29, "outside the 28 hidden states"),
        ("downsample_ratio", 0.4, "1 over a whole number, not 0.4"),
        ("downsample_ratio", 1 / 3, "does not divide the grid of 32 patches"),
        ("ps_version", "v3", "ps_version must be one of"),
        ("pooling", "weighted_avg", "pooling must be one of"),
        ("bidirectional_attention", False, "causal backbones are not supported"),
        ("force_image_size", 448, "is 448, but the position embeddings are for 512 pixels"),
        ("img_context_token_id", 128266, "vocab_size is 128266"),
        ("query_prefix", 3, "query_prefix must be a string"),
        ("matryoshka_dimensions", [4096], r"must lie in 1\.\.2048"),
        ("matryoshka_dimensions", "all", "must be a list of integers"),
    ],
)
def test_what_is_refused(full: Path, key: str, value: Any, message: str) -> None:
    if key == "query_prefix":
        edit(full / "processor_config.json", query_prefix=None)
    with pytest.raises(CheckpointError, match=message) as caught:
        changed(full, "config.json", {key: value})
    assert str(full / "config.json") in str(caught.value)


def test_pooling_is_never_guessed(full: Path) -> None:
    with pytest.raises(CheckpointError, match="pooling is missing"):
        changed(full, "config.json", {"pooling": None, "llm_config.pooling": None})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("image_size", 448, "is 448, but the position embeddings are for 512 pixels"),
        ("num_image_token", 255, "is 255, but the vision shapes make 256"),
        ("norm_type", "clip", "norm_type must be one of"),
        ("min_input_tiles", 7, "max_input_tiles is 6, below the 7"),
    ],
)
def test_what_is_refused_of_the_processor(full: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        changed(full, "processor_config.json", {key: value})
    assert "processor_config.json" in str(caught.value)


def test_files_that_cannot_be_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        read_config(tmp_path)
    path = Path(shutil.copytree(make_checkpoint(), tmp_path / "c"))
    for content in (b"{", b"\xff\xfe", b"[]"):
        (path / "processor_config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"processor_config\.json: "):
            read_config(path)
