"""Prompts of Llama Nemotron ColEmbed VL, and how its checkpoints are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.models import family_of, open_model
from tessera.models.base import Output, OutputKind
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tests.models.changing import changed, edit
from tests.models.conftest import WriteCheckpoint
from tests.references.llama_nemotron_vl import ColEmbedReference

pytestmark = pytest.mark.parity

SMALL = replace(COLEMBED_TINY, image_size=64, base_vocab=600)


@pytest.fixture(scope="module")
def path(written: WriteCheckpoint) -> Path:
    return written(SMALL, dtype="bfloat16")


def test_the_prefix_stands_twice(path: Path) -> None:
    reference = ColEmbedReference(path)
    ids = reference.tokens("", [1], "passage")
    assert reference.tokenizer.decode(ids) == "passage:  passage: "


def test_the_class_of_the_embedding_model(path: Path, tmp_path: Path) -> None:
    assert open_model(path).output == Output(kind=OutputKind.TOKENS, width=128, pooling="none")
    assert family_of(path).name == "llama_nemotron_colembed_vl"
    copy = changed(path, tmp_path / "copy", architectures=["LlamaNemotronVLModel"])
    assert open_model(copy).family == "llama_nemotron_colembed_vl"
    edit(copy / "config.json", pooling="avg")
    assert open_model(copy).family == "llama_nemotron_vl"
