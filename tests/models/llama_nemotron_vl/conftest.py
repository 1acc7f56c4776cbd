from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import CheckpointSpec

SMALL = CheckpointSpec(image_size=64, base_vocab=600)

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Write a checkpoint of 64-pixel tiles, changed as the arguments say; equal arguments share one."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def make(*, dtype: str = "float32", seed: int = 0, **changes: Any) -> Path:
        spec = dataclasses.replace(SMALL, **changes)
        key = repr((spec, dtype, seed))
        if key not in made:
            made[key] = root / str(len(made))
            write_checkpoint(made[key], spec, seed=seed, dtype=dtype)
        return made[key]

    return make


@pytest.fixture(scope="session")
def small(make_checkpoint: MakeCheckpoint) -> LlamaNemotronVL:
    return LlamaNemotronVL(make_checkpoint())
