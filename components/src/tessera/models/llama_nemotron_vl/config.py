"""What a checkpoint's files say about its shapes, preprocessing, prompts and pooling; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tessera.models.base import Role
from tessera.nn.spec import LayerSpec, TextSpec

PixelShuffle = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The SigLIP encoder; sizes in pixels, channels or counts."""

    image_size: int
    patch_size: int
    channels: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    eps: float
    activation: str
    select_layer: int
    """Which hidden state is the feature: -1 is the last one after the final norm, any other value
    counts in the list [embeddings, layer 1, ..., layer n] without that norm."""

    @property
    def layer(self) -> LayerSpec:
        """A layer of the encoder."""
        return LayerSpec.encoder(
            self.hidden, self.heads, self.intermediate, activation=self.activation, eps=self.eps
        )

    @property
    def grid(self) -> int:
        """Patches along one edge of a tile."""
        return self.image_size // self.patch_size

    @property
    def patch_features(self) -> int:
        return self.channels * self.patch_size**2

    @property
    def layers_used(self) -> int:
        """How many layers have to run for the selected feature."""
        return self.select_layer if self.select_layer >= 0 else self.layers + 1 + self.select_layer

    @property
    def final_norm(self) -> bool:
        return self.select_layer == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """Pixel shuffle and the two-layer network from vision features to backbone rows."""

    factor: int
    """``factor`` by ``factor`` neighbouring patches become one row."""
    version: PixelShuffle
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """How an image becomes tiles, and how their bytes become numbers."""

    tile_size: int
    min_tiles: int
    max_tiles: int
    """Tiles in the largest grid, the thumbnail not counted."""
    dynamic: bool
    """False: the whole image becomes one tile."""
    thumbnail: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """Prefixes include their trailing space."""

    prefixes: Mapping[Role, str]
    image_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All of it. ``max_tokens`` bounds one input; ``dimensions`` are output widths beside the backbone's."""

    vision: VisionConfig
    projector: ProjectorConfig
    text: TextSpec
    image: ImageConfig
    prompt: PromptConfig
    max_tokens: int
    dimensions: frozenset[int]

    @property
    def tokens_per_tile(self) -> int:
        return (self.vision.grid // self.projector.factor) ** 2

    @property
    def max_tiles(self) -> int:
        """Most tiles one image can become, the thumbnail counted."""
        if not self.image.dynamic:
            return 1
        return self.image.max_tiles + (self.image.thumbnail and self.image.max_tiles > 1)

    def vision_activations(self, tiles: int) -> int:
        """Elements alive at the widest point of ``tiles`` through the encoder and the projector."""
        vision = self.vision
        patches = tiles * vision.grid**2
        # The pixels as bytes, in float32 before and after normalising, whatever the module's type.
        pixels = 3 * vision.patch_features
        encoder = patches * max(vision.layer.activations(), vision.hidden + pixels)
        rows = tiles * self.tokens_per_tile
        projector = 3 * patches * vision.hidden + 3 * rows * self.text.layer.hidden
        return max(encoder, projector)
