"""Reads ``config.json`` and the files of the processor; torch-free.

A key that may be absent takes the default of the class in ``transformers`` that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.checkpoint.declared import Declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.weights import Shapes
from tessera.models.decoder import check_architecture, max_positions, read_theta, rope_section, rope_type
from tessera.models.ministral3.config import read_pooling, read_text, with_defaults
from tessera.models.nemotron_3_5_embed.images import Limits
from tessera.models.patches import PatchedVision
from tessera.models.two_towers.config import check_channels
from tessera.models.two_towers.images import (
    CLIP_MEAN,
    CLIP_STD,
    Processing,
    check_same,
    read_processing,
    read_processor,
)
from tessera.nn.spec import CHANNELS, LayerSpec, TextSpec, linear_shapes, norm_shapes

ARCHITECTURES: Final = ("Mistral3Model", "Mistral3ForConditionalGeneration")
SETTINGS_FILE: Final = "processor_config.json"
MARKS: Final = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
"""The token of a vision row, that behind each row of an image but the last, and that behind the last."""

_EPS: Final = 1e-5  # of Pixtral's norms, which no file says
_ACTIVATIONS: Final = ("gelu", "silu", "gelu_pytorch_tanh", "quick_gelu", "relu")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(PatchedVision):
    """Pixtral's transformer and the projector behind it."""

    width: int
    """Of a row, the backbone's."""
    activation: str
    """Of the projector."""
    bias: bool
    """In the projector's two products behind the merge."""
    norm_eps: float
    """Of the projector's norm."""

    def shapes(self) -> Shapes:
        """The tower's tensors by canonical name, as files hold them."""
        hidden = self.layer.hidden
        shapes: Shapes = {
            "vision.patch_conv.weight": (hidden, CHANNELS, self.patch_size, self.patch_size),
            "vision.ln_pre.weight": (hidden,),
        }
        for name, shape in self.layer.stacked(self.layers).items():
            number, part, rest = name.split(".", 2)
            shapes[f"vision.transformer.layers.{number}.{NAMES[part]}.{rest}"] = shape
        shapes |= norm_shapes("vision.projector.norm", hidden, bias=False)
        merged = hidden * self.merge**2
        shapes |= linear_shapes("vision.projector.patch_merger.merging_layer", merged, hidden, bias=False)
        shapes |= linear_shapes("vision.projector.linear_1", hidden, self.width, bias=self.bias)
        shapes |= linear_shapes("vision.projector.linear_2", self.width, self.width, bias=self.bias)
        return shapes


NAMES: Final = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "mlp": "feed_forward",
}
"""The names of a layer's parts, and those that Pixtral's files have for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """``marks`` are tokens by name: of a vision row, behind each row of an image, and behind the last."""

    text: TextSpec
    max_positions: int
    vision: VisionConfig
    processing: Processing
    limits: Limits
    marks: tuple[str, str, str]
    image_token: int


def read_config(directory: Path, declared: Declared, *, pooling: str, longest_edge: int) -> ModelConfig:
    """Read and cross-check the configuration in ``directory``; raises ``CheckpointError``.

    ``pooling`` is for a checkpoint that declares none, and a ``longest_edge`` of 0 is the processor's.
    """
    config = Section.read(directory / CONFIG_FILE)
    check_architecture(config, ARCHITECTURES)
    section = with_defaults(config.section("text_config"))
    # Without a type transformers reads Mistral's, which is another one.
    section.string("model_type", among=("ministral3",))
    text = read_text(section, pooling=read_pooling(config, declared, pooling))
    vision = _vision(config, text, norm_eps=text.layer.eps)
    processor, settings = read_processor(directory), Section.read(directory / SETTINGS_FILE)
    check_same(settings, "patch_size", vision.patch_size, default=16)
    check_same(settings, "spatial_merge_size", vision.merge, default=1)
    image, end, last = (
        settings.string(key, default)
        for key, default in zip(("image_token", "image_break_token", "image_end_token"), MARKS, strict=True)
    )
    return ModelConfig(
        text=text,
        max_positions=max_positions(section),
        vision=vision,
        processing=read_processing(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        limits=Limits(edge=vision.edge, longest=longest_edge or _longest_edge(processor)),
        marks=(image, end, last),
        image_token=config.integer(
            "image_token_index", config.integer("image_token_id", 10, at_least=0), at_least=0
        ),
    )


def _longest_edge(processor: Section) -> int:
    if not processor.has("size"):
        return 1024
    size = processor.section("size")
    if size.has("longest_edge"):
        return size.integer("longest_edge")
    height, width = size.integer("height"), size.integer("width")
    if height != width:
        raise size.error("height", f"must be the width {width}, not {height}")
    return height


def _vision(config: Section, text: TextSpec, *, norm_eps: float) -> VisionConfig:
    section = config.section("vision_config")
    section.string("model_type", "pixtral", among=("pixtral",))
    check_channels(section)
    hidden, heads = section.integer("hidden_size", 1024), section.integer("num_attention_heads", 16)
    if hidden % (4 * heads):
        raise section.error(
            "hidden_size",
            f"must be a multiple of four times num_attention_heads {heads}, for rotary positions",
        )
    layers = section.integer("num_hidden_layers", 24)
    feature = config.values.get("vision_feature_layer")
    if feature not in (None, -1, layers, [-1]):
        raise config.error("vision_feature_layer", f"must be -1, the last layer's output, not {feature!r}")
    rope = rope_section(section)
    rope_type(rope, ("default", "axial"))
    layer = LayerSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=section.integer("intermediate_size", 4096),
        activation=section.string("hidden_act", "gelu", among=_ACTIVATIONS),
        norm="rms",
        eps=_EPS,
        gated=True,
    )
    return VisionConfig(
        layers=layers,
        layer=layer,
        patch_size=section.integer("patch_size", 16),
        merge=config.integer("spatial_merge_size", 2),
        theta=read_theta(rope, section, 10_000.0),
        width=text.layer.hidden,
        activation=config.string("projector_hidden_act", "gelu", among=_ACTIVATIONS),
        bias=config.flag("multimodal_projector_bias", False),
        norm_eps=norm_eps,
    )
