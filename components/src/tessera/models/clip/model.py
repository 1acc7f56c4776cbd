"""A checkpoint of CLIP as the rest of Tessera sees it; importing and opening need no torch.

The prompt of a text: ``<|startoftext|>``, the text, ``<|endoftext|>``, whose state is pooled. Attention looks
back alone, so that padding behind it would change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import token_name
from tessera.checkpoint.weights import Shapes
from tessera.errors import InvalidInput
from tessera.models.base import Content, Family, Prompt, Truncate
from tessera.models.decoder import refuse_flags
from tessera.models.marks import Marks
from tessera.models.options import NoOptions, OptionsFamily
from tessera.models.two_towers.config import (
    BASE,
    Defaults,
    VisionConfig,
    check_channels,
    read_layer,
    read_sizes,
    tower_section,
)
from tessera.models.two_towers.images import (
    CLIP_MEAN,
    CLIP_STD,
    read_processing,
    read_processor,
    read_tiling,
)
from tessera.models.two_towers.model import TiledTowers
from tessera.models.two_towers.tensors import stack_shapes
from tessera.nn.spec import CHANNELS, EncoderSpec, HeadSpec, linear_shapes, norm_shapes

_TEXT: Final = Defaults(
    activation="quick_gelu",
    eps=1e-5,
    sizes={
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
    },
)
_VISION: Final = replace(_TEXT, sizes=BASE)
_WIDTH: Final = 512
_END: Final = 49_407
_LARGEST: Final = 2


class Clip(TiledTowers):
    """Implements ``tessera.models.base.Model``."""

    family = "clip"
    vision_class = "tessera.models.clip.vision:ClipVision"

    def __init__(self, path: Path, options: NoOptions) -> None:
        config = Section.read(path / CONFIG_FILE)
        text, processor = _text(config), read_processor(path)
        size, vision = _vision(config)
        processing = read_processing(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD)
        super().__init__(path, text, vision, processing)
        self.tiling = read_tiling(processor, size=size, patch=vision.patch_size, crops=True)
        first = self._tokenizer.id_of(token_name(path, "bos_token", "<|startoftext|>"))
        self._last = self._tokenizer.id_of(token_name(path, "eos_token", "<|endoftext|>"))
        self._check_last(tower_section(config, "text_config", first_years=True))
        self.marks = Marks((first,), (self._last,))

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """As the base. Token ids end with the first end token, where the reference pools them."""
        made = super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)
        if content.images or content.token_ids is None:
            return made
        ends = np.flatnonzero(made.tokens == self._last)
        if not len(ends):
            raise InvalidInput(
                f"{param} has no end token {self._last}, whose state is the vector", param=param
            )
        return replace(made, tokens=made.tokens[: ends[0] + 1])

    def _check_last(self, section: Section) -> None:
        """Raise ``CheckpointError`` unless the reference pools the end token.

        It pools the first token of the configured id, or the largest id where that is 2, as older files have.
        """
        end = section.integer("eos_token_id", _END, at_least=0)
        if end != self._last and (end != _LARGEST or self._last != self._tokenizer.largest):
            raise section.error("eos_token_id", f"is {end}, and texts end with the token {self._last}")

    @property
    def patches(self) -> int:
        """The patches of a tile, and the class token."""
        return super().patches + 1

    def vision_shapes(self) -> Shapes:
        vision = self.config
        hidden, patch = vision.layer.hidden, vision.patch_size
        return {
            "vision.class_token": (hidden,),
            "vision.patches.projection.weight": (hidden, CHANNELS, patch, patch),
            "vision.embed_positions.weight": (self.patches, hidden),
            **norm_shapes("vision.pre_norm", hidden),
            **stack_shapes(vision.layer, vision.layers),
            **linear_shapes("vision.projection", hidden, vision.width, bias=False),
        }


def _text(config: Section) -> EncoderSpec:
    section = tower_section(config, "text_config", first_years=True)
    layer, layers = read_layer(section, _TEXT)
    return EncoderSpec(
        vocab_size=section.integer("vocab_size", 49_408),
        layers=layers,
        layer=replace(layer, causal=True),
        pooling="last",
        head=HeadSpec(width=config.integer("projection_dim", _WIDTH)),
        positions=section.integer("max_position_embeddings", 77),
    )


def _vision(config: Section) -> tuple[int, VisionConfig]:
    """Read the edge of a tile in pixels, and the tower."""
    section = tower_section(config, "vision_config", first_years=True)
    refuse_flags(section, "is_causal", why="; attention to the left alone is not supported")
    check_channels(section)
    layer, layers = read_layer(section, _VISION)
    size, patch = read_sizes(section, image_size=224, patch_size=32)
    width = config.integer("projection_dim", _WIDTH)
    return size, VisionConfig(layer=layer, layers=layers, patch_size=patch, grid=size // patch, width=width)


FAMILY: Family = OptionsFamily(
    model_types=("clip",),
    hub_models=(
        "openai/clip-vit-base-patch32",
        "openai/clip-vit-base-patch16",
        "openai/clip-vit-large-patch14",
        "openai/clip-vit-large-patch14-336",
        "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    ),
    options=NoOptions,
    opened=Clip,
    architectures=("CLIPModel",),
)
