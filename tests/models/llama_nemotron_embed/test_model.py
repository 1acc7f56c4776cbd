"""Prompts, limits and files of the family that reads text alone, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.errors import CheckpointError, ConfigError
from tessera.models import open_model
from tessera.models.base import Role, Truncate
from tessera.models.llama_nemotron_embed.model import LlamaNemotronEmbed, Options
from tessera_tools.random_checkpoint.llama import TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.running import prompt_of
from tests.references.llama_nemotron_embed import LlamaReference


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(TINY)


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaNemotronEmbed:
    return LlamaNemotronEmbed(path, Options())


def test_what_it_is(model: LlamaNemotronEmbed) -> None:
    assert model.family == "llama_nemotron_embed"
    assert model.vision is None
    assert model.output.width == 512
    assert model.max_tokens == 8192
    assert model.dimensions == {384}
    assert not model.text.layer.causal and model.text.pooling == "mean"


@pytest.mark.parity
@pytest.mark.parametrize("role", list(Role))
def test_prompts(model: LlamaNemotronEmbed, path: Path, role: Role) -> None:
    expected = LlamaReference(path).tokens("what is this?", role.value)
    assert prompt_of(model, "what is", " this?", role=role).tokens.tolist() == expected
    pieces = model.pieces("what is this?", role=role, param="x")
    assert [piece.token for piece in pieces] == expected
    assert "".join(piece.text for piece in pieces[1:]).endswith("what is this?")


def test_truncation_keeps_the_beginning(model: LlamaNemotronEmbed) -> None:
    text = "one two three four five six seven eight"
    whole = prompt_of(model, text, role=Role.QUERY).tokens.tolist()
    fixed = len(prompt_of(model, "1", role=Role.QUERY).tokens) - 2  # but for the space before the digit
    for limit in range(fixed + 2, len(whole)):
        end = prompt_of(model, text, role=Role.QUERY, limit=limit, truncate=Truncate.END)
        start = prompt_of(model, text, role=Role.QUERY, limit=limit, truncate=Truncate.START)
        assert end.truncated and start.truncated
        assert end.tokens.tolist() == whole[:limit]
        assert start.tokens.tolist() == whole[:fixed] + whole[len(whole) - (limit - fixed) :]


def test_pooling_that_no_file_names(path: Path, tmp_path: Path) -> None:
    unnamed = changed(path, tmp_path / "changed", pooling=None)
    mean, last = (LlamaNemotronEmbed(unnamed, Options(pooling=kind)) for kind in ("avg", "last"))
    assert (mean.text.pooling, last.text.pooling) == ("mean", "last")
    assert mean.fingerprint != last.fingerprint
    assert LlamaNemotronEmbed(path, Options(pooling="last")).text.pooling == "mean"


@pytest.mark.parity
def test_what_a_file_says_beside(path: Path, tmp_path: Path) -> None:
    model = open_model(
        changed(
            path, tmp_path / "changed", matryoshka_dimensions=[64, 512], query_prefix="q:", passage_prefix=""
        )
    )
    assert model.dimensions == {64}
    plain = LlamaReference(path).tokens
    assert prompt_of(model, "a", role=Role.QUERY).tokens.tolist() == plain("q: a", "none")
    assert prompt_of(model, "a", role=Role.PASSAGE).tokens.tolist() == plain("a", "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pixels": 1}, "unknown to llama_nemotron_embed"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"pooling": "mean"}, "pooling"),
    ],
)
def test_options_that_there_are_not(path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_model(path, options)


def test_tensors_that_are_left_alone(path: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    copy = changed(path, tmp_path / "changed")
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_file(tensors, copy / "model.safetensors")
    open_model(copy).load_text(dtype="float32", device="cpu")
    save_file(tensors | {"score.weight": torch.ones(1, 512)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'score\.weight'"):
        open_model(copy).load_text(dtype="float32", device="cpu")
