"""Builds this family's torch modules and fills them, also as a stage for compilers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import nn

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.tensors import stored_tensors
from tessera.models.llama_nemotron_vl.vision import VisionTower
from tessera.models.stages import StageModule, StageTensor
from tessera.nn import loading
from tessera.nn.forms.choice import exported
from tessera.nn.forms.plain import Form

SOURCES: Final = {
    **loading.SOURCES,
    "patches.projection": ("embeddings.patch_embedding",),
    "positions": ("embeddings.position_embedding",),
    "layers": ("encoder.layers",),
    "input_layernorm": ("layer_norm1",),
    "post_attention_layernorm": ("layer_norm2",),
    "o_proj": ("out_proj",),
    "up_proj": ("fc1",),
    "down_proj": ("fc2",),
    "norm": ("0",),
    "linear_1": ("1",),
    "linear_2": ("3",),
}
"""What the vision tower's modules are called in checkpoints."""


def load_vision(
    path: Path, config: ModelConfig, *, dtype: str, device: str, form: Form | None = None
) -> VisionTower:
    """The encoder and projector on ``device``; raises ``CheckpointError``."""
    at = torch.device(device)
    tensors = stored_tensors(path, config)
    with torch.device("meta"):
        tower = VisionTower(config)
    fill(tower, tensors, part="", sources=SOURCES, dtype=torch_dtype(dtype), device=at)
    return tower.prepare(config.image, at, form)


class VisionStage(nn.Module):
    """uint8 ``[tiles, channels, size, size]`` to ``[tiles, tokens_per_tile, hidden]``."""

    def __init__(self, tower: VisionTower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return self.tower.rows(tiles)


def vision_stage(
    path: Path, config: ModelConfig, *, dtype: str, device: str, max_sequences: int
) -> StageModule:
    """The vision stage; raises ``CheckpointError``."""
    form = exported(torch.device(device), torch_dtype(dtype), max_sequences=max_sequences)
    tower = load_vision(path, config, dtype=dtype, device=device, form=form)
    channels, size = config.vision.channels, config.image.tile_size
    rows = ("units", config.tokens_per_tile, config.text.layer.hidden)
    return StageModule(
        module=VisionStage(tower).eval(),
        inputs=(StageTensor(name="tiles", dtype="uint8", axes=("units", channels, size, size)),),
        outputs=(StageTensor(name="vision_rows", dtype=dtype, axes=rows),),
    )
