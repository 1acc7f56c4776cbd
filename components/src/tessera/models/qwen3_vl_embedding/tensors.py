"""The shapes of a checkpoint's tensors by canonical name.

A canonical name is made of its part and its name inside the part: ``vision.blocks.0.norm1.weight``,
``text.norm.weight``.
"""

from __future__ import annotations

from tessera.checkpoint.weights import Shapes
from tessera.models.qwen3_vl_embedding.config import ModelConfig, VisionConfig
from tessera.nn.spec import CHANNELS, linear_shapes, norm_shapes


def expected(config: ModelConfig) -> Shapes:
    """Every tensor that the checkpoint must have."""
    return vision_shapes(config.vision) | config.text.shapes("text.")


def vision_shapes(config: VisionConfig) -> Shapes:
    """The vision tower's tensors by canonical name."""
    hidden, wide = config.layer.hidden, config.layer.intermediate
    patch = (CHANNELS, config.frames, config.patch_size, config.patch_size)
    shapes: Shapes = {
        "patch_embed.proj.weight": (hidden, *patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (config.grid**2, hidden),
    }
    for block in range(config.layers):
        stem = f"blocks.{block}."
        shapes |= norm_shapes(f"{stem}norm1", hidden) | norm_shapes(f"{stem}norm2", hidden)
        for name, inner, columns in (
            ("attn.qkv", hidden, 3 * hidden),
            ("attn.proj", hidden, hidden),
            ("mlp.linear_fc1", hidden, wide),
            ("mlp.linear_fc2", wide, hidden),
        ):
            shapes |= linear_shapes(stem + name, inner, columns)
    merged = hidden * config.merge**2
    mergers = [("merger", hidden)]
    mergers += [(f"deepstack_merger_list.{level}", merged) for level in range(len(config.deepstack))]
    for name, normalised in mergers:
        shapes |= norm_shapes(f"{name}.norm", normalised)
        shapes |= linear_shapes(f"{name}.linear_fc1", merged, merged)
        shapes |= linear_shapes(f"{name}.linear_fc2", merged, config.out_hidden)
    return {f"vision.{name}": shape for name, shape in shapes.items()}
