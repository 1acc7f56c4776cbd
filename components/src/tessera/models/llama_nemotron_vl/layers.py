"""The two towers of this family as ``nn`` has them; torch-free."""

from __future__ import annotations

from typing import Final

from tessera.models.llama_nemotron_vl.config import ModelConfig, RopeConfig, TextConfig, VisionConfig
from tessera.nn.spec import LayerSpec, Pooling, RopeSpec, TextSpec

_POOLING: Final[dict[str, Pooling]] = {"avg": "mean", "last": "last", "cls": "first"}


def text_spec(config: TextConfig) -> TextSpec:
    """The bidirectional Llama backbone."""
    return TextSpec(
        vocab_size=config.vocab_size,
        layers=config.layers,
        layer=LayerSpec(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate,
            activation=config.activation,
            norm="rms",
            eps=config.eps,
            gated=True,
        ),
        rope=_rope(config.rope),
        pooling=_POOLING[config.pooling],
    )


def vision_layer(config: VisionConfig) -> LayerSpec:
    """A layer of the SigLIP encoder."""
    return LayerSpec(
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=config.hidden // config.heads,
        intermediate=config.intermediate,
        activation=config.activation,
        norm="layer",
        eps=config.eps,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def vision_activations(config: ModelConfig, tiles: int) -> int:
    """Elements alive at the widest point of ``tiles`` through the encoder and the projector."""
    vision = config.vision
    patches = tiles * vision.grid**2
    # The pixels as bytes, in float32 before and after normalising, whatever the module's type.
    pixels = 3 * vision.patch_features
    encoder = patches * max(vision_layer(vision).activations(), vision.hidden + pixels)
    rows = tiles * config.tokens_per_tile
    projector = 3 * patches * vision.hidden + 3 * rows * config.text.hidden
    return max(encoder, projector)


def _rope(config: RopeConfig) -> RopeSpec:
    return RopeSpec(
        theta=config.theta,
        rope_type=config.rope_type,
        factor=config.factor,
        low_freq_factor=config.low_freq_factor,
        high_freq_factor=config.high_freq_factor,
        original_max_positions=config.original_max_positions,
    )
