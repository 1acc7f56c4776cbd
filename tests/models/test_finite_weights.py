"""Weights that are no numbers are refused by the name of their tensor, whichever tensor it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.loading import TensorReader, as_stored
from tessera.checkpoint.safetensors import StoredTensor
from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera_tools.random_checkpoint import llama_nemotron_vl, qwen3, towers
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, TINY
from tessera_tools.random_checkpoint.spec import Spec
from tests.checkpoint.modelopt import quantise
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint


def load(path: Path, dtype: str = "float32") -> None:
    model = open_model(path)
    if model.vision is not None:
        model.load_vision(dtype=dtype, device="cpu")
    model.load_text(dtype=dtype, device="cpu")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[StoredTensor]:
    """Each tensor that is read, in turn."""
    found: list[StoredTensor] = []
    original = TensorReader.read

    def noted(self: TensorReader, tensor: StoredTensor, into: torch.Tensor) -> None:
        found.append(tensor)
        original(self, tensor, into)

    monkeypatch.setattr(TensorReader, "read", noted)
    return found


SPECS: Final[dict[str, Spec]] = {
    "bert": TINY,
    "bert_rerank": RERANK_TINY,
    "qwen3": qwen3.TINY,
    "clip": towers.CLIP_TINY,
    "llama_nemotron_vl": llama_nemotron_vl.TINY,
}


@pytest.mark.parametrize("family", SPECS)
def test_each_tensor(
    family: str, written: WriteCheckpoint, tmp_path: Path, reads: list[StoredTensor]
) -> None:
    path = changed(written(SPECS[family]), tmp_path / "model")
    load(path)
    wrong = (np.nan, np.inf, -np.inf)
    # Of larger checkpoints some.
    for place, tensor in enumerate(reads[:: max(1, len(reads) // 24)]):
        with tensor.file.open("r+b") as file:
            last = tensor.start + tensor.nbytes - 4
            right = os.pread(file.fileno(), 4, last)
            os.pwrite(file.fileno(), np.float32(wrong[place % 3]).tobytes(), last)
            with pytest.raises(CheckpointError, match=f"{tensor.name!r} has values that are no numbers"):
                load(path)
            os.pwrite(file.fileno(), right, last)
    load(path)


def test_a_number_that_the_type_cannot_hold(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = changed(written(TINY), tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("1.attention.self.key.weight"))
    weights[name][0, 0] = -1e5
    save_file(weights, path / "model.safetensors")
    load(path)
    load(path, "bfloat16")
    with pytest.raises(CheckpointError) as raised:
        load(path, "float16")
    assert f"{name!r} has values up to 100000, which float16 cannot hold" in str(raised.value)


def test_a_byte_of_fp8_that_is_no_number(checkpoint: Path, tmp_path: Path) -> None:
    path = quantise(checkpoint, tmp_path / "model", static=True)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("0.self_attn.k_proj.weight"))
    weights[name].view(torch.uint8)[-1, -1] = 0xFF
    save_file(weights, path / "model.safetensors")
    for context in (as_stored(), torch.no_grad()):
        with context, pytest.raises(CheckpointError, match=f"{name!r} has values that are no numbers"):
            load(path)
