"""Options of ColQwen3, and files that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import Content, Output, OutputKind, Role, Truncate
from tessera_tools.random_checkpoint.qwen3 import COL_TINY
from tests.models.changing import changed, edit
from tests.models.conftest import WriteCheckpoint

pytestmark = pytest.mark.parity

OPS = replace(COL_TINY, ops=True, text_prefix="language_model.", vision_prefix="visual.", width=96)


def test_what_it_is(written: WriteCheckpoint) -> None:
    tomoro, ops = open_model(written(COL_TINY, dtype="bfloat16")), open_model(written(OPS, dtype="bfloat16"))
    assert tomoro.family == ops.family == "colqwen3"
    assert (tomoro.output.width, ops.output.width) == (320, 96)
    assert tomoro.output == Output(kind=OutputKind.TOKENS, width=320, pooling="none")
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
