"""Vectors of tokens against transformers' Qwen3-VL and a linear layer, and against the same with mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import Content, Output, OutputKind, Role, Truncate
from tessera.models.colqwen3.model import ColQwen3, Options
from tessera_tools.random_checkpoint.qwen3 import COL_TINY, ColQwen3Spec
from tests.models.changing import changed, edit
from tests.models.colqwen3.cases import CASES
from tests.models.conftest import WriteCheckpoint
from tests.models.parity import BARS, Parity, Record
from tests.models.qwen3_vl_embedding.test_mistakes import MISTAKES
from tests.references.qwen3 import ColQwen3Reference

pytestmark = pytest.mark.parity

PARITY = Parity(title="colqwen3", cases=CASES)
OPS = replace(COL_TINY, ops=True, text_prefix="language_model.", vision_prefix="visual.", width=96)
CONFIGURATIONS: dict[str, ColQwen3Spec] = {
    "tomoro": COL_TINY,
    "tomoro, no bias": replace(COL_TINY, bias=False, width=64, shards=2),
    "ops": OPS,
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_vectors(name: str, written: WriteCheckpoint, record_property: Record) -> None:
    spec = CONFIGURATIONS[name]
    path = written(spec, dtype="bfloat16")
    model = ColQwen3(path, Options())
    assert model.output == Output(kind=OutputKind.TOKENS, width=spec.width, pooling="none")
    wanted = PARITY.expected(ColQwen3Reference(path))
    for dtype in BARS:
        PARITY.check(name, model, wanted, dtype, record_property)


def no_bias(reference: ColQwen3Reference) -> None:
    reference.projection.bias = None


def projection_of_the_state_before_the_final_norm(reference: ColQwen3Reference) -> None:
    reference.model.language_model.norm = torch.nn.Identity()


def attention_to_both_sides(reference: ColQwen3Reference) -> None:
    reference.causal = False


@pytest.mark.parametrize(
    "mistake",
    [
        no_bias,
        projection_of_the_state_before_the_final_norm,
        attention_to_both_sides,
        MISTAKES["one dimensional positions"],
        MISTAKES["deepstack dropped"],
        MISTAKES["chunked mrope"],
    ],
)
def test_a_mistake_fails_both_bars(
    written: WriteCheckpoint,
    mistake: Callable[[ColQwen3Reference], None],
    found: np.ndarray,
    record_property: Record,
) -> None:
    reference = ColQwen3Reference(written(COL_TINY, dtype="bfloat16"))
    mistake(reference)
    PARITY.check_mistake(mistake.__name__, reference, found, record_property)


@pytest.fixture(scope="module")
def found(written: WriteCheckpoint) -> np.ndarray:
    return PARITY.found(ColQwen3(written(COL_TINY, dtype="bfloat16"), Options()), "float32")


def test_what_it_is(written: WriteCheckpoint) -> None:
    tomoro, ops = open_model(written(COL_TINY, dtype="bfloat16")), open_model(written(OPS, dtype="bfloat16"))
    assert tomoro.family == ops.family == "colqwen3"
    assert (tomoro.output.width, ops.output.width) == (320, 96)
    assert tomoro.dimensions == frozenset() and ops.dimensions == frozenset(range(32, 96))
    assert tomoro.plan(2000, 2000, param="x").rows <= 1280


def test_queries_by_the_options(written: WriteCheckpoint) -> None:
    path = written(COL_TINY, dtype="bfloat16")
    query = Content(parts=("river",), role=Role.QUERY)
    bare = Content(parts=("river",))
    plain = open_model(path, {"query_prefix": "", "query_end_tokens": 0})
    given = {"max_tokens": 100, "truncate": Truncate.NONE, "param": "x"}
    assert plain.prompt(query, **given).tokens.tolist() == plain.prompt(bare, **given).tokens.tolist()  # type: ignore[arg-type]
    default = open_model(path).prompt(query, **given).tokens.tolist()  # type: ignore[arg-type]
    assert len(set(default[-10:])) == 1 and default[-11] != default[-10]


def test_a_projection_that_does_not_fit_is_refused(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(COL_TINY, dtype="bfloat16"), tmp_path / "changed", embed_dim=128)
    with pytest.raises(CheckpointError, match=r"embedding_proj_layer.* must have shape \[128"):
        open_model(path).load_text(dtype="float32", device="cpu")
    edit(path / "config.json", embed_dim=COL_TINY.width)
    weights = load_file(path / "model.safetensors")
    del weights["embedding_proj_layer.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"text\.head\.weight.* is missing"):
        open_model(path).load_text(dtype="float32", device="cpu")
