"""Reads ``config.json`` and ``preprocessor_config.json``; torch-free.

The pixel limits in ``preprocessor_config.json`` are those of training. The reference processor runs with its
own, which are the options' defaults, so the file's are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Final

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.decoder import check_architecture, max_positions, read_theta, rope_section, rope_type
from tessera.models.patches import PatchedVision
from tessera.models.qwen3.config import read_text
from tessera.models.two_towers.images import (
    CLIP_MEAN,
    CLIP_STD,
    check_same,
    read_normalisation,
    read_processor,
)
from tessera.nn.spec import LayerSpec, TextSpec

_ARCHITECTURES: Final = ("Qwen3VLForConditionalGeneration", "Qwen3VLModel", "Qwen3VLForEmbedding")
_FRAMES: Final = 2
_DEEPSTACK: Final = (8, 16, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(PatchedVision):
    """The vision transformer and its mergers."""

    out_hidden: int
    grid: int
    """Positions along each edge of the learned table."""
    deepstack: tuple[int, ...]
    """After which blocks, counted from 0, the further parts of a row are taken."""
    frames: int = _FRAMES

    @property
    def row_width(self) -> int:
        """The main row, and one for each block of ``deepstack``."""
        return self.out_hidden * (1 + len(self.deepstack))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    text: TextSpec
    max_positions: int
    vision: VisionConfig
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token: int
    vision_start: int
    vision_end: int


def read_config(directory: Path, architectures: Sequence[str] = _ARCHITECTURES) -> ModelConfig:
    """Read and cross-check the configuration in ``directory``; raises ``CheckpointError``."""
    config = Section.read(directory / CONFIG_FILE)
    check_architecture(config, architectures)
    vision = _vision(config.section("vision_config"))
    section = config.section("text_config")
    text = read_text(section, sections=True, levels=len(vision.deepstack))
    if vision.out_hidden != text.layer.hidden:
        raise section.error("hidden_size", f"must be out_hidden_size {vision.out_hidden} of vision_config")
    processor = read_processor(directory)
    check_same(processor, "patch_size", vision.patch_size, default=14)
    check_same(processor, "merge_size", vision.merge, default=2)
    check_same(processor, "temporal_patch_size", vision.frames, default=2)
    mean, std = read_normalisation(processor, mean=CLIP_MEAN, std=CLIP_STD)
    return ModelConfig(
        text=text,
        max_positions=max_positions(section),
        vision=vision,
        mean=mean,
        std=std,
        image_token=config.integer("image_token_id", 151655, at_least=0),
        vision_start=config.integer("vision_start_token_id", 151652, at_least=0),
        vision_end=config.integer("vision_end_token_id", 151653, at_least=0),
    )


def _vision(section: Section) -> VisionConfig:
    section.string("model_type", "qwen3_vl", among=("qwen3_vl", "qwen3_vl_vision"))
    for key, value in (("in_channels", 3), ("temporal_patch_size", _FRAMES)):
        if section.integer(key, value) != value:
            raise section.error(key, f"must be {value}")
    rope = rope_section(section)
    rope_type(rope, ("default", "axial"))
    hidden, heads, layers = (section.integer(key) for key in ("hidden_size", "num_heads", "depth"))
    # By which name transformers knows the same number, too.
    if section.integer("num_attention_heads", heads) != heads:
        raise section.error("num_attention_heads", f"must be num_heads {heads}")
    if hidden % (4 * heads):
        raise section.error(
            "hidden_size", f"must be a multiple of four times num_heads {heads}, for rotary positions"
        )
    positions = section.integer("num_position_embeddings", 2304)
    if isqrt(positions) ** 2 != positions:
        raise section.error("num_position_embeddings", f"must be a square, not {positions}")
    blocks = section.integers("deepstack_visual_indexes")
    if not section.has("deepstack_visual_indexes"):
        blocks = _DEEPSTACK
    if list(blocks) != sorted(set(blocks)) or any(not 0 <= block < layers for block in blocks):
        raise section.error("deepstack_visual_indexes", f"must ascend within the {layers} blocks")
    layer = LayerSpec.encoder(
        hidden,
        heads,
        section.integer("intermediate_size"),
        activation=section.string("hidden_act", "gelu_pytorch_tanh", among=("gelu_pytorch_tanh",)),
        eps=1e-6,
    )
    return VisionConfig(
        layers=layers,
        layer=layer,
        patch_size=section.integer("patch_size", 16),
        merge=section.integer("spatial_merge_size", 2),
        out_hidden=section.integer("out_hidden_size"),
        grid=isqrt(positions),
        deepstack=blocks,
        theta=read_theta(rope, section, 10_000.0),
    )
