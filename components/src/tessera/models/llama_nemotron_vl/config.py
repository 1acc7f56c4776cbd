"""What a checkpoint's files say about its shapes, preprocessing, prompts and pooling; torch-free.

Where both ``config.json`` and ``processor_config.json`` have a value, the latter wins: it is what the
reference processor runs with, and the tile limit in ``config.json`` is a leftover from training. A key that
may be absent takes the default of the class that would have read it in ``transformers``, because saving drops
values that equal those defaults. ``pooling`` has no default: existing loaders disagree about it, and a wrong
guess would only show as bad search results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from tessera.checkpoint.declared import Declared, read_declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.models.base import OutputKind, Role
from tessera.models.decoder import max_positions
from tessera.models.llama.config import (
    EMBEDDING,
    POOLINGS,
    SCORING,
    read_backbone,
    read_dimensions,
    read_score_head,
    refuse_causal,
)
from tessera.models.llama.prompt import read_prefixes
from tessera.models.two_towers.config import Defaults, check_channels, read_layer
from tessera.nn.spec import CHANNELS, LayerSpec, TextSpec

PROCESSOR_FILE = "processor_config.json"

_NORMALISATION: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_VISION = Defaults(activation="gelu_pytorch_tanh", eps=1e-6)
_DEFAULT_MAX_TOKENS = 10240
_NORM = "norm_type"

PixelShuffle = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The SigLIP encoder; sizes in pixels or counts."""

    image_size: int
    patch_size: int
    layer: LayerSpec
    layers: int
    select_layer: int
    """Which hidden state is the feature: -1 is the last one after the final norm, any other value
    counts in the list [embeddings, layer 1, ..., layer n] without that norm."""

    @property
    def grid(self) -> int:
        """Patches along one edge of a tile."""
        return self.image_size // self.patch_size

    @property
    def patch_features(self) -> int:
        return CHANNELS * self.patch_size**2

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
class ModelConfig:
    """All of it.

    ``prefixes`` include their trailing space. ``max_tokens`` bounds one input; ``dimensions`` are output
    widths beside the backbone's.
    """

    declared: Declared
    vision: VisionConfig
    projector: ProjectorConfig
    text: TextSpec
    image: ImageConfig
    prefixes: Mapping[Role, str]
    image_token_id: int
    max_tokens: int
    dimensions: frozenset[int]
    lacking_keys: tuple[str, ...]
    """What the processor's file lacks, and is as in the published models' code."""

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
        encoder = patches * max(vision.layer.activations(), vision.layer.hidden + pixels)
        rows = tiles * self.tokens_per_tile
        projector = 3 * patches * vision.layer.hidden + 3 * rows * self.text.layer.hidden
        return max(encoder, projector)


def read_config(directory: Path, output: OutputKind = OutputKind.VECTOR) -> ModelConfig:
    """Read and cross-check the configuration of a family with this output; raises ``CheckpointError``."""
    config = Section.read(directory / CONFIG_FILE)
    processor = Section.read(directory / PROCESSOR_FILE)
    declared = read_declared(directory)
    text = _text(config, output)
    vision = _vision(config)
    projector = _projector(config, vision)
    model = ModelConfig(
        declared=declared,
        vision=vision,
        projector=projector,
        text=text,
        image=_image(config, processor, vision),
        prefixes=read_prefixes(processor, config, declared=declared),
        image_token_id=_image_token(config, text),
        max_tokens=_max_tokens(config, processor),
        dimensions=read_dimensions(config, text.layer.hidden),
        # The reranker's processor has one norm and takes no other.
        lacking_keys=() if processor.has(_NORM) or output is OutputKind.SCORE else (_NORM,),
    )
    if processor.has("num_image_token"):
        stated = processor.integer("num_image_token")
        if stated != model.tokens_per_tile:
            raise processor.error(
                "num_image_token", f"is {stated}, but the vision shapes make {model.tokens_per_tile}"
            )
    return model


def _vision(config: Section) -> VisionConfig:
    section = config.section("vision_config")
    section.string("model_type", "siglip_vision_model", among=("siglip_vision_model",))
    check_channels(section)
    layer, layers = read_layer(section, _VISION)
    vision = VisionConfig(
        image_size=section.integer("image_size"),
        patch_size=section.integer("patch_size", 16),
        layer=layer,
        layers=layers,
        select_layer=config.integer("select_layer", -1, at_least=None),
    )
    if vision.image_size % vision.patch_size:
        raise section.error("image_size", f"must be a multiple of patch_size {vision.patch_size}")
    if not -vision.layers - 1 <= vision.select_layer <= vision.layers:
        raise config.error(
            "select_layer", f"is {vision.select_layer}, outside the {vision.layers + 1} hidden states"
        )
    return vision


def _projector(config: Section, vision: VisionConfig) -> ProjectorConfig:
    ratio = config.number("downsample_ratio", 0.5)
    factor = round(1 / ratio)
    if factor < 1 or abs(1 / factor - ratio) > 1e-9:
        raise config.error("downsample_ratio", f"must be 1 over a whole number, not {ratio}")
    if vision.grid % factor:
        raise config.error("downsample_ratio", f"{ratio} does not divide the grid of {vision.grid} patches")
    return ProjectorConfig(
        factor=factor,
        version=cast(PixelShuffle, config.string("ps_version", "v2", among=("v1", "v2"))),
        eps=config.number("projector_layer_norm_eps", 1e-5),
    )


def _text(config: Section, output: OutputKind) -> TextSpec:
    if not config.flag("bidirectional_attention", True):
        raise config.error("bidirectional_attention", "is false; causal backbones are not supported")
    section = config.section("llm_config")
    refuse_causal(config)
    if output is OutputKind.TOKENS:
        return read_backbone(section, pooling="none")
    # the composite class hands the backbone's value on where the top level has none
    pooling = config if config.has("pooling") or not section.has("pooling") else section
    states = POOLINGS[pooling.string("pooling", among=tuple(POOLINGS))]
    if output is OutputKind.SCORE:
        architectures, head = (SCORING, EMBEDDING), read_score_head(config)
        return read_backbone(section, pooling=states, architectures=architectures, head=head)
    return read_backbone(section, pooling=states)


def _image(config: Section, processor: Section, vision: VisionConfig) -> ImageConfig:
    for source, key in ((processor, "image_size"), (config, "force_image_size")):
        if source.has(key) and source.integer(key) != vision.image_size:
            raise source.error(
                key,
                f"is {source.integer(key)}, but the position embeddings are for {vision.image_size} pixels",
            )
    mean, std = _NORMALISATION[processor.string(_NORM, "siglip", among=tuple(_NORMALISATION))]
    smallest = processor.integer("min_input_tiles", config.integer("min_dynamic_patch", 1))
    largest = processor.integer("max_input_tiles", config.integer("max_dynamic_patch", 6))
    if smallest > largest:
        raise processor.error("max_input_tiles", f"is {largest}, below the {smallest} of min_input_tiles")
    return ImageConfig(
        tile_size=vision.image_size,
        min_tiles=smallest,
        max_tiles=largest,
        dynamic=processor.flag("dynamic_image_size", config.flag("dynamic_image_size", False)),
        thumbnail=processor.flag("use_thumbnail", config.flag("use_thumbnail", False)),
        mean=mean,
        std=std,
    )


def _image_token(config: Section, text: TextSpec) -> int:
    image_token = config.integer("img_context_token_id", 128258, at_least=0)
    if image_token >= text.vocab_size:
        raise config.error("img_context_token_id", f"is {image_token}, vocab_size is {text.vocab_size}")
    return image_token


def _max_tokens(config: Section, processor: Section) -> int:
    """The passage limit, at which the reference processor truncates.

    The backbone's own 131,072 positions are no guide, since it was tuned on far shorter inputs. Absent
    from both files, the limit is the reference class's default, which is also what is recommended for
    image and text together; the shorter query limit is a matter of truncation, not of what fits.
    """
    limit = processor.integer("p_max_length", config.integer("p_max_length", _DEFAULT_MAX_TOKENS))
    return min(limit, max_positions(config.section("llm_config")))
