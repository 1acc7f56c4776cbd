"""Builds the decoder and fills it from the weight files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.checkpoint.safetensors import StoredTensor
from tessera.nn.spec import TextSpec
from tessera.nn.text import TextTower

# One GEMM instead of several.
_SOURCES: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_text(tensors: Mapping[str, StoredTensor], spec: TextSpec, *, dtype: str, device: str) -> TextTower:
    """The decoder on ``device``, from tensors named ``text.`` and on; raises ``CheckpointError``."""
    at = torch.device(device)
    with torch.device("meta"):
        tower = TextTower(spec)
    fill(tower, tensors, part="text.", sources=_SOURCES, dtype=torch_dtype(dtype), device=at)
    return tower.prepare(at)
