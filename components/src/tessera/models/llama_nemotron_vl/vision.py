"""The SigLIP encoder and the projector: tiles in, rows of the backbone's width out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.stages import StageModule, StageTensor
from tessera.nn.forms.plain import Form
from tessera.nn.layer import SOURCES
from tessera.nn.spec import CHANNELS
from tessera.nn.vision import Merger, TileEncoder, VisionTower, pixel_shuffle


class LlamaNemotronVision(VisionTower):
    """Makes ``[tiles * tokens_per_tile, hidden]``; tiles see nothing of one another."""

    sources = {
        **SOURCES,
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

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config.projector
        vision = config.vision
        self.vision = TileEncoder(
            vision.layer,
            vision.layers_used,
            patch=vision.patch_size,
            grid=vision.grid,
            final_norm=vision.final_norm,
        )
        features, hidden = config.vision.layer.hidden * config.projector.factor**2, config.text.layer.hidden
        self.projector = Merger(width=features, join=1, inner=hidden, out=hidden, eps=config.projector.eps)

    def prepare(self, mean: Sequence[float], std: Sequence[float], device: torch.device, form: Form) -> None:
        self.vision.prepare(mean, std, device, form)

    def forward(
        self, pixels: torch.Tensor, positions: torch.Tensor, cu_units: torch.Tensor, units: Sequence[int]
    ) -> torch.Tensor:
        return self.rows(pixels).flatten(0, 1)

    def rows(self, tiles: torch.Tensor) -> torch.Tensor:
        """``[n, channels, size, size]``, uint8 or normalised, to ``[n, tokens_per_tile, hidden]``."""
        joined = pixel_shuffle(self.vision(tiles), self._config.factor, self._config.version)
        rows: torch.Tensor = self.projector(joined.flatten(0, 1))
        return rows.view(*joined.shape[:2], rows.shape[1])


class VisionStage(nn.Module):
    """uint8 ``[tiles, channels, size, size]`` to ``[tiles, tokens_per_tile, hidden]``."""

    def __init__(self, tower: LlamaNemotronVision) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return self.tower.rows(tiles)


def vision_stage(tower: VisionTower, config: ModelConfig, *, dtype: str) -> StageModule:
    """The vision stage of a tower."""
    assert isinstance(tower, LlamaNemotronVision)
    size = config.image.tile_size
    rows = ("units", config.tokens_per_tile, config.text.layer.hidden)
    return StageModule(
        module=VisionStage(tower).eval(),
        inputs=(StageTensor(name="tiles", dtype="uint8", axes=("units", CHANNELS, size, size)),),
        outputs=(StageTensor(name="vision_rows", dtype=dtype, axes=rows),),
    )
