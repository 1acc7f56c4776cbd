"""Builds each stage of a checkpoint as a module for compilers, and reads the weights it needs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.errors import ConfigError
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.loading import SOURCES, load_text, load_vision
from tessera.models.llama_nemotron_vl.stage_fused import FusedStage
from tessera.models.llama_nemotron_vl.stage_text import (
    Embed,
    PackedText,
    PaddedLayers,
    PaddedPool,
    PaddedText,
)
from tessera.models.llama_nemotron_vl.stage_vision import VisionStage
from tessera.models.llama_nemotron_vl.tensors import stored_tensors
from tessera.models.llama_nemotron_vl.text import TextTower
from tessera.models.stages import Axis, StageModule, StageTensor


def load_stage(
    path: Path, config: ModelConfig, stage: str, *, layout: str, dtype: str, device: str, max_sequences: int
) -> StageModule:
    """Raises ``CheckpointError``, and ``ConfigError`` for a stage or layout that there is not."""
    loader = _Loader(path, config, dtype, device)
    if layout == "packed" and stage == "text":
        return loader.packed_text(max_sequences)
    if layout not in ("padded", "packed"):
        raise ConfigError(f"layout {layout!r} is none of padded, packed")
    makers = {
        "vision": loader.vision,
        "text": loader.text,
        "fused": loader.fused,
        "embed": loader.embed,
        "lm": loader.lm,
        "post": loader.post,
    }
    if stage not in makers:
        raise ConfigError(f"stage {stage!r} is none of {', '.join(makers)}")
    if layout == "packed" and stage != "vision":
        raise ConfigError(f"stage {stage!r} has no packed layout; text and vision have")
    return makers[stage]()


class _Loader:
    def __init__(self, path: Path, config: ModelConfig, dtype: str, device: str) -> None:
        self._path = path
        self._config = config
        self._dtype = dtype
        self._device = device

    def vision(self) -> StageModule:
        channels, size = self._config.vision.channels, self._config.image.tile_size
        return StageModule(
            module=self._vision(),
            inputs=(StageTensor(name="tiles", dtype="uint8", axes=("units", channels, size, size)),),
            outputs=(self._float("vision_rows", "units", self._config.tokens_per_tile),),
        )

    def text(self) -> StageModule:
        return StageModule(
            module=self._text(),
            inputs=(
                _ids("input_ids"),
                _ids("attention_mask"),
                self._float("vision_rows", "rows"),
                _ids("vision_map"),
            ),
            outputs=self._vectors(),
        )

    def packed_text(self, max_sequences: int) -> StageModule:
        tower = self._tower()
        module = PackedText(tower, self._config.text.pooling, max_sequences=max_sequences)
        return StageModule(
            module=module.eval(),
            inputs=(
                StageTensor(name="input_ids", dtype="int32", axes=("tokens",)),
                StageTensor(name="positions", dtype="int32", axes=("tokens",)),
                StageTensor(name="ends", dtype="int32", axes=("sequences",)),
                self._float("vision_rows", "rows"),
                StageTensor(name="vision_map", dtype="int32", axes=("tokens",)),
            ),
            outputs=self._vectors(),
            fused_attention=module.fused_attention,
        )

    def fused(self) -> StageModule:
        module = FusedStage(
            self._vision(),
            self._text(),
            image_token_id=self._config.prompt.image_token_id,
            tokens_per_tile=self._config.tokens_per_tile,
        )
        channels, size = self._config.vision.channels, self._config.image.tile_size
        tiles = StageTensor(name="tiles", dtype="uint8", axes=("sequences", "units", channels, size, size))
        return StageModule(
            module=module.eval(),
            inputs=(tiles, _ids("input_ids"), _ids("attention_mask")),
            outputs=self._vectors(),
        )

    def embed(self) -> StageModule:
        tower = self._empty()
        self._fill(tower.embed_tokens, "text.embed_tokens.")
        rows = self._float("vision_rows", "units", self._config.tokens_per_tile)
        return StageModule(
            module=Embed(tower).eval(),
            inputs=(_ids("input_ids"), rows, _ids("vision_map")),
            outputs=(self._float("embedded", "sequences", "tokens"),),
        )

    def lm(self) -> StageModule:
        tower = self._empty()
        self._fill(tower.layers, "text.layers.")
        self._fill(tower.norm, "text.norm.")
        tower.place_constants(torch.device(self._device))
        return StageModule(
            module=PaddedLayers(tower).eval(),
            inputs=(self._float("embedded", "sequences", "tokens"), _ids("attention_mask")),
            outputs=(self._float("hidden", "sequences", "tokens"),),
        )

    def post(self) -> StageModule:
        return StageModule(
            module=PaddedPool(self._config.text.pooling).eval(),
            inputs=(self._float("hidden", "sequences", "tokens"), _ids("attention_mask")),
            outputs=self._vectors(),
        )

    def _vision(self) -> VisionStage:
        tower = load_vision(self._path, self._config, dtype=self._dtype, device=self._device)
        return VisionStage(tower, self._config.vision).eval()

    def _text(self) -> PaddedText:
        return PaddedText(self._tower(), self._config.text.pooling).eval()

    def _tower(self) -> TextTower:
        return load_text(self._path, self._config, dtype=self._dtype, device=self._device)

    def _empty(self) -> TextTower:
        with torch.device("meta"):
            return TextTower(self._config.text)

    def _fill(self, module: nn.Module, part: str) -> None:
        fill(
            module,
            stored_tensors(self._path, self._config),
            part=part,
            sources=SOURCES,
            dtype=torch_dtype(self._dtype),
            device=torch.device(self._device),
        )

    def _float(self, name: str, *axes: Axis) -> StageTensor:
        return StageTensor(name=name, dtype=self._dtype, axes=(*axes, self._config.text.hidden))

    def _vectors(self) -> tuple[StageTensor, ...]:
        return (
            StageTensor(name="vectors", dtype="float32", axes=("sequences", self._config.text.hidden)),
            StageTensor(name="norms", dtype="float32", axes=("sequences",)),
        )


def _ids(name: str) -> StageTensor:
    return StageTensor(name=name, dtype="int32", axes=("sequences", "tokens"))
