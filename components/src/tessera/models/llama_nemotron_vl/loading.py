"""Builds this family's torch modules and fills them from the weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.tensors import stored_tensors
from tessera.models.llama_nemotron_vl.text import TextTower
from tessera.models.llama_nemotron_vl.vision import VisionTower

# One GEMM instead of several.
SOURCES: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_vision(path: Path, config: ModelConfig, *, dtype: str, device: str) -> VisionTower:
    """The encoder and projector on ``device``; raises ``CheckpointError``."""
    at, kind = torch.device(device), torch_dtype(dtype)
    tensors = stored_tensors(path, config)
    with torch.device("meta"):
        tower = VisionTower(config)
    fill(tower, tensors, part="", sources=SOURCES, dtype=kind, device=at)
    tower.vision.embeddings.place_constants(config.image, at)
    tower.prepare(at, kind)
    return tower.eval()


def load_text(path: Path, config: ModelConfig, *, dtype: str, device: str) -> TextTower:
    """The backbone on ``device``; raises ``CheckpointError``."""
    at, kind = torch.device(device), torch_dtype(dtype)
    tensors = stored_tensors(path, config)
    with torch.device("meta"):
        tower = TextTower(config.text)
    fill(tower, tensors, part="text.", sources=SOURCES, dtype=kind, device=at)
    tower.place_constants(at)
    return tower.eval()
