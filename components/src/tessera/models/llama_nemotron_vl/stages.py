"""Builds the vision stage of a checkpoint as a module for compilers, and reads the weights it needs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tessera.checkpoint.loading import torch_dtype
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.loading import load_vision
from tessera.models.llama_nemotron_vl.vision import VisionTower
from tessera.models.stages import StageModule, StageTensor
from tessera.nn.forms.choice import exported


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
