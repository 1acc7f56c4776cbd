"""Checkpoints that tools saved again, and that the reference loads, are served with the same vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera_tools.random_checkpoint.llama import LlamaSpec
from tessera_tools.random_checkpoint.qwen3 import TINY
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.running import Given, batch_of, vectors

CASES = [Given(parts=("a text",)), Given(parts=("another one, which is longer",))]
INDEX = "model.safetensors.index.json"
SHARDED = replace(TINY, shards=2)
LLAMA = LlamaSpec()


def embedded(path: Path) -> np.ndarray:
    model = open_model(path)
    return vectors(model, model.load_text(dtype="float32", device="cpu"), batch_of(model, None, CASES))


def change(path: Path, update: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    update(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("shard", ["model-00002-of-00002.safetensors", "model-00003-of-00003.safetensors"])
def test_an_index_may_list_a_head_that_no_file_has(
    shard: str, written: WriteCheckpoint, tmp_path: Path
) -> None:
    source = written(SHARDED)
    path = changed(source, tmp_path / "copy")
    change(path / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": shard}))
    assert np.array_equal(embedded(path), embedded(source))
    assert open_model(path).fingerprint == open_model(source).fingerprint


def test_a_shard_that_is_needed_may_not_be_missing(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(SHARDED), tmp_path / "copy")
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"00002\.safetensors, which is not there: 1 of 2 files are missing"
    ):
        embedded(path)


def test_architectures_may_be_null(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(TINY), tmp_path / "copy")
    change(path / "config.json", lambda config: config.update(architectures=None))
    assert np.array_equal(embedded(path), embedded(written(TINY)))


def test_weights_may_be_float64(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(TINY), tmp_path / "copy")
    weights = load_file(path / "model.safetensors")
    save_file({name: value.to(torch.float64) for name, value in weights.items()}, path / "model.safetensors")
    assert np.array_equal(embedded(path), embedded(written(TINY)))


def test_rope_may_stand_in_the_old_and_in_the_new_form(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(LLAMA), tmp_path / "copy")
    scaling = json.loads((path / "config.json").read_text())["rope_scaling"]
    new = {**scaling, "rope_theta": LLAMA.rope_theta}
    change(path / "config.json", lambda config: config.update(rope_parameters=new))
    assert np.array_equal(embedded(path), embedded(written(LLAMA)))
    change(path / "config.json", lambda config: config["rope_parameters"].update(rope_theta=7.0))
    with pytest.raises(CheckpointError, match="are both there and differ"):
        open_model(path)
