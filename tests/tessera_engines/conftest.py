"""A small checkpoint as ONNX files for the group ``onnx``; writing each takes 9 s of processor time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines.cli import main
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import CheckpointSpec


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaNemotronVL:
    path = tmp_path_factory.mktemp("models") / "small"
    write_checkpoint(path, CheckpointSpec(image_size=64, base_vocab=600), seed=0, dtype="float32")
    return LlamaNemotronVL(path)


@pytest.fixture(scope="session")
def directory(model: LlamaNemotronVL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both forms of a Triton repository, written by the command."""
    out = tmp_path_factory.mktemp("triton")
    for form in ("split", "fused"):
        main(
            [
                *("export", "--model-path", str(model.path), "--triton", form, "--out", str(out / form)),
                *("--max-sequences", "8", "--max-tokens", "256", "--max-tiles", "4"),
            ]
        )
    return out
