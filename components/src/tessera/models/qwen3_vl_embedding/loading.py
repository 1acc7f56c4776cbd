"""Builds this family's torch modules and fills them from the weight files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.checkpoint.safetensors import StoredTensor
from tessera.models.qwen3_vl_embedding.config import ModelConfig
from tessera.models.qwen3_vl_embedding.vision import VisionTower

_SOURCES: Final = {
    "projection": ("proj",),
    "layers": ("blocks",),
    "input_layernorm": ("norm1",),
    "post_attention_layernorm": ("norm2",),
    "self_attn": ("attn",),
    "qkv_proj": ("qkv",),
    "o_proj": ("proj",),
    "up_proj": ("linear_fc1",),
    "down_proj": ("linear_fc2",),
    "deepstack": ("deepstack_merger_list",),
    "linear_1": ("linear_fc1",),
    "linear_2": ("linear_fc2",),
}


def load_vision(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, *, dtype: str, device: str
) -> VisionTower:
    """The vision tower on ``device``; raises ``CheckpointError``."""
    at = torch.device(device)
    with torch.device("meta"):
        tower = VisionTower(config.vision)
    fill(tower, tensors, part="vision.", sources=_SOURCES, dtype=torch_dtype(dtype), device=at)
    return tower.prepare(config, at)
