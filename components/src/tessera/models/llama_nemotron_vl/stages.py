"""Builds each stage of a checkpoint as a module for compilers, and reads the weights it needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from tessera.checkpoint.loading import torch_dtype
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.loading import load_vision
from tessera.models.llama_nemotron_vl.tensors import stored_tensors
from tessera.models.llama_nemotron_vl.vision import VisionTower
from tessera.models.stages import StageModule, StageTensor, check_stage
from tessera.models.text_stages import TEXT_STAGES, PaddedText, TextStages
from tessera.nn.forms.choice import exported


class VisionStage(nn.Module):
    """uint8 ``[tiles, channels, size, size]`` to ``[tiles, tokens_per_tile, hidden]``."""

    def __init__(self, tower: VisionTower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return self.tower.rows(tiles)


class FusedStage(nn.Module):
    """Both stages in one: pixels and tokens in, vectors out.

    Always runs the encoder; rows without placeholders among their tokens never see what came of it. Every row
    brings its own tiles, so that each input has the batch as its first axis. The placeholders of
    a row take the rows of its tiles in order, which counting them finds without looking for them.
    """

    def __init__(self, vision: VisionStage, text: PaddedText, config: ModelConfig) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self._image_token_id = config.prompt.image_token_id
        self._tokens_per_tile = config.tokens_per_tile

    def forward(
        self, tiles: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ``[sequences, tiles, channels, size, size]`` and two int32 ``[sequences, tokens]``."""
        rows = self.vision(tiles.flatten(0, 1))
        each = tiles.shape[1] * self._tokens_per_tile
        is_image = input_ids == self._image_token_id
        within = is_image.to(torch.int32).cumsum(1, dtype=torch.int32) - 1
        first = torch.arange(tiles.shape[0], device=tiles.device, dtype=torch.int32) * each
        # More placeholders than rows is the caller's mistake; it must not read beyond them.
        vision_map = torch.where(is_image, first[:, None] + within.clamp(max=each - 1), -1)
        vectors, norms = self.text(input_ids, attention_mask, rows, vision_map)
        return vectors, norms


def load_stage(
    path: Path,
    config: ModelConfig,
    stage: str,
    *,
    family: str,
    unit_length: bool,
    layout: str,
    dtype: str,
    device: str,
    max_sequences: int,
) -> StageModule:
    """Raises ``CheckpointError``, and ``ConfigError`` for a stage or layout that there is not."""
    check_stage(stage, layout, ("vision", "text", "fused", "embed", "lm", "post"))
    text = TextStages(
        family=family,
        spec=config.text,
        tensors=partial(stored_tensors, path, config),
        part="text.",
        dtype=dtype,
        device=device,
        max_sequences=max_sequences,
        image_axes=("units", config.tokens_per_tile),
        unit_length=unit_length,
    )
    if stage in TEXT_STAGES:
        return text.load(stage, layout)
    if stage == "fused":
        text.require_padded()
    channels, size = config.vision.channels, config.image.tile_size
    form = exported(torch.device(device), torch_dtype(dtype), max_sequences=max_sequences)
    tower = load_vision(path, config, dtype=dtype, device=device, form=form)
    vision = VisionStage(tower).eval()
    if stage == "vision":
        rows = ("units", config.tokens_per_tile, config.text.layer.hidden)
        return StageModule(
            module=vision,
            inputs=(StageTensor(name="tiles", dtype="uint8", axes=("units", channels, size, size)),),
            outputs=(StageTensor(name="vision_rows", dtype=dtype, axes=rows),),
        )
    tiles = StageTensor(name="tiles", dtype="uint8", axes=("sequences", "units", channels, size, size))
    ids = tuple(
        StageTensor(name=name, dtype="int32", axes=("sequences", "tokens"))
        for name in ("input_ids", "attention_mask")
    )
    module = FusedStage(vision, text.padded(), config)
    return StageModule(module=module.eval(), inputs=(tiles, *ids), outputs=text.vectors())
