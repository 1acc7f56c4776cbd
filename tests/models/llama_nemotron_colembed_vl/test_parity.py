"""Vectors of tokens against transformers' own modules reading the same files, and against mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessera.models import family_of, open_model
from tessera.models.base import Output, OutputKind
from tessera.models.llama_nemotron_vl.model import LlamaNemotronColEmbedVL
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tests.models.changing import changed, edit
from tests.models.conftest import WriteCheckpoint
from tests.models.llama_nemotron_colembed_vl.cases import CASES
from tests.models.parity import BARS, Parity, Record
from tests.models.running import preprocessed, prompts
from tests.references.llama_nemotron_vl import ColEmbedReference

pytestmark = pytest.mark.parity

SMALL = replace(COLEMBED_TINY, image_size=64, base_vocab=600)
PARITY = Parity(title="llama_nemotron_colembed_vl", cases=CASES)


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(SMALL, dtype="bfloat16")


def test_vectors(path: Path, record_property: Record) -> None:
    model = open_model(path)
    assert isinstance(model, LlamaNemotronColEmbedVL)
    assert model.output == Output(kind=OutputKind.TOKENS, width=128, pooling="none")
    reference = ColEmbedReference(path)
    pixels = preprocessed(model, CASES)
    for each, made in zip(CASES, prompts(model, CASES, pixels), strict=True):
        tiles = [len(pixels[image].values) for image in each.images]
        text = "".join(part for part in each.parts if isinstance(part, str))
        assert made.tokens.tolist() == reference.tokens(text, tiles, each.role.value)
    wanted = PARITY.expected(reference)
    for dtype in BARS:
        PARITY.check("", model, wanted, dtype, record_property)


def test_the_prefix_stands_twice(path: Path) -> None:
    reference = ColEmbedReference(path)
    ids = reference.tokens("", [1], "passage")
    assert reference.tokenizer.decode(ids) == "passage:  passage: "


def causal(reference: ColEmbedReference) -> None:
    def last_hidden(embedded: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = reference.text(inputs_embeds=embedded[None], use_cache=False)[0][0]
            return found

    reference.last_hidden = last_hidden  # type: ignore[method-assign]


def state_before_the_final_norm(reference: ColEmbedReference) -> None:
    reference.text.norm = torch.nn.Identity()


def no_norm_behind_the_encoder(reference: ColEmbedReference) -> None:
    reference.vision.post_layernorm = torch.nn.Identity()


@pytest.mark.parametrize("mistake", [causal, state_before_the_final_norm, no_norm_behind_the_encoder])
def test_a_mistake_fails_both_bars(
    path: Path, mistake: Callable[[ColEmbedReference], None], record_property: Record
) -> None:
    reference = ColEmbedReference(path)
    mistake(reference)
    found = PARITY.found(LlamaNemotronColEmbedVL(path))
    PARITY.check_mistake(mistake.__name__, reference, found, record_property)


def test_the_class_of_the_embedding_model(path: Path, tmp_path: Path) -> None:
    assert family_of(path).name == "llama_nemotron_colembed_vl"
    copy = changed(path, tmp_path / "copy", architectures=["LlamaNemotronVLModel"])
    assert open_model(copy).family == "llama_nemotron_colembed_vl"
    edit(copy / "config.json", pooling="avg")
    assert open_model(copy).family == "llama_nemotron_vl"
