"""Prompts, marks, limits and files of the family that reads text through Ministral 3's decoder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import CheckpointError, ConfigError
from tessera.models import open_model
from tessera.models.base import Role, Truncate
from tessera.models.marks import marks_of
from tessera.models.ministral3.config import read_text, with_defaults
from tessera.models.nemotron_3_embed.model import Nemotron3Embed, Options
from tessera_tools.random_checkpoint.ministral3 import TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.nemotron_3_embed.cases import CASES
from tests.models.running import batch_of, cosines, prompt_of, vectors
from tests.references.ministral3 import Ministral3Reference


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(TINY)


@pytest.fixture(scope="module")
def model(path: Path) -> Nemotron3Embed:
    return Nemotron3Embed(path, Options())


def test_what_it_is(model: Nemotron3Embed) -> None:
    assert model.vision is None and model.placeholder is None
    assert (model.output.width, model.max_tokens) == (128, 32768)
    assert model.dimensions == frozenset(range(1, 128))
    assert not model.text.layer.causal and model.text.pooling == "mean"


@pytest.mark.parity
def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    from transformers import Ministral3Config

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ministral3"}))
    text = read_text(with_defaults(Section.read(tmp_path / "config.json")), pooling="mean")
    config = Ministral3Config()
    layer, rope = text.layer, config.rope_parameters
    assert (text.vocab_size, text.layers) == (config.vocab_size, config.num_hidden_layers)
    assert (layer.hidden, layer.intermediate) == (config.hidden_size, config.intermediate_size)
    assert (layer.heads, layer.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (layer.head_dim, layer.eps, layer.causal) == (config.head_dim, config.rms_norm_eps, True)
    assert (text.rope.theta, text.rope.factor) == (rope["rope_theta"], rope["factor"])
    assert text.rope.original_max_positions == rope["original_max_position_embeddings"]
    assert text.rope.query_beta == rope["llama_4_scaling_beta"]
    assert (text.rope.mscale, text.rope.mscale_all_dim) == (rope["mscale"], rope["mscale_all_dim"])


@pytest.mark.parity
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("marks", ["none", "bos", "bos and eos"])
def test_prompts(written: WriteCheckpoint, marks: Any, role: Role) -> None:
    path = written(dataclasses.replace(TINY, marks=marks))
    expected = Ministral3Reference(path).tokens("what is this?", role.value)
    model = Nemotron3Embed(path, Options())
    assert prompt_of(model, "what is", " this?", role=role).tokens.tolist() == expected
    assert [piece.token for piece in model.pieces("what is this?", role=role, param="x")] == expected
    cut = prompt_of(model, "what is this river?" * 9, role=role, limit=16, truncate=Truncate.END).tokens
    assert len(cut) == 16
    assert (cut[-1] == model._tokenizer.id_of("</s>")) == (marks == "bos and eos")


@pytest.mark.parity
@pytest.mark.parametrize(
    "flags", [{"add_bos_token": False}, {"add_bos_token": True}, {"add_eos_token": True}]
)
def test_settings_of_marks_change_nothing(path: Path, tmp_path: Path, flags: dict[str, bool]) -> None:
    """As in transformers, which the reference asks."""
    copy = changed(path, tmp_path / "changed", "tokenizer_config.json", **flags)
    tokenizer = PlainTokenizer.read(copy, vocab_size=model_vocabulary(copy))
    marks = marks_of(tokenizer)
    around = [*marks.before, *tokenizer.ids("river").tolist(), *marks.behind]
    assert around == Ministral3Reference(copy).tokens("river", "none")


def model_vocabulary(path: Path) -> int:
    size: int = json.loads((path / "config.json").read_text())["vocab_size"]
    return size


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({"type": "None"}, "post_processor is not readable"),
        (
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [4000], "tokens": ["<s>"]}},
            },
            "post_processor adds the id 4000, but vocab_size is 2014",
        ),
    ],
)
def test_a_post_processor_that_is_none(path: Path, tmp_path: Path, processor: Any, words: str) -> None:
    copy = changed(path, tmp_path / "changed", "tokenizer.json", post_processor=processor)
    with pytest.raises(CheckpointError, match=words):
        open_model(copy)


def test_a_checkpoint_that_declares_no_pooling_may_be_a_language_model(written: WriteCheckpoint) -> None:
    path = written(dataclasses.replace(TINY, pooling=None, declares=False))
    with pytest.raises(CheckpointError, match="pooling is missing, and no modules"):
        open_model(path)
    assert Nemotron3Embed(path, Options(pooling="last")).text.pooling == "last"
    with pytest.raises(ConfigError, match="pooling"):
        open_model(path, {"pooling": "mean"})


@pytest.mark.parity
def test_what_a_file_says_beside(path: Path, tmp_path: Path) -> None:
    model = open_model(
        changed(path, tmp_path / "changed", matryoshka_dimensions=[64, 128], query_prefix="q:")
    )
    assert model.dimensions == {64}
    plain = Ministral3Reference(path).tokens
    assert prompt_of(model, "a", role=Role.QUERY).tokens.tolist() == plain("q: a", "none")
    assert open_model(changed(path, tmp_path / "changed", is_causal=True)).text.layer.causal


def test_weights_of_four_bits_are_multiplied_out(path: Path, tmp_path: Path) -> None:
    """ModelOpt's NVFP4 but for embeddings and norms: vectors of the weights that it stands for."""
    quantisation = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head"],
    }
    packed, plain = changed(path, tmp_path / "changed", quantization_config=quantisation), tmp_path / "plain"
    stored = load_file(path / "model.safetensors")
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values: dict[str, torch.Tensor] = {}
    files: dict[str, torch.Tensor] = {}
    for name, weight in stored.items():
        if "_proj." not in name:
            files[name] = values[name] = weight
            continue
        rows, columns = weight.shape
        blocks = weight.float().reshape(rows, columns // 16, 16)
        overall = weight.abs().max() / (6 * 448)
        scale = (blocks.abs().amax(2) / 6 / overall).to(torch.float8_e4m3fn)
        step = scale.float()[..., None] * overall
        nearest = (blocks / step).abs()[..., None].sub(levels).abs().argmin(-1)
        bits = (nearest + 8 * (blocks < 0)).reshape(rows, columns).to(torch.uint8)
        values[name] = (levels[nearest] * torch.where(blocks < 0, -1.0, 1.0) * step).reshape(rows, columns)
        stem = name.removesuffix("weight")
        files[name] = bits[:, ::2] | bits[:, 1::2] << 4
        files |= {f"{stem}weight_scale": scale, f"{stem}weight_scale_2": overall}
        files[f"{stem}input_scale"] = torch.tensor(0.01)
    save_file(files, packed / "model.safetensors")
    shutil.copytree(path, plain)
    save_file(values, plain / "model.safetensors")
    found, expected, whole = (_vectors(place) for place in (packed, plain, path))
    assert cosines(found, expected).min() >= 0.999999
    assert cosines(found, whole).min() < 0.9999  # what four bits cost, so that the two are told apart


def _vectors(path: Path) -> np.ndarray:
    model = open_model(path)
    return vectors(model, model.load_text(dtype="float32", device="cpu"), batch_of(model, None, CASES[:5]))
