"""The vision tower of this family as ``nn`` has it; torch-free."""

from __future__ import annotations

from tessera.models.llama_nemotron_vl.config import ModelConfig, VisionConfig
from tessera.nn.spec import LayerSpec


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
    projector = 3 * patches * vision.hidden + 3 * rows * config.text.layer.hidden
    return max(encoder, projector)
