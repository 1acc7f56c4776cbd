"""The tensors that a checkpoint of this family has, by canonical name, and their shapes.

Each tensor has one canonical name here, made of its part and its name inside the part:
``vision.post_layernorm.weight``, ``projector.0.weight``, ``text.layers.0.mlp.up_proj.weight``. Files
spell the parts' prefixes in several ways, depending on which tool wrote them.
"""

from __future__ import annotations

from tessera.checkpoint.weights import Shapes
from tessera.models.llama_nemotron_vl.config import ModelConfig, ProjectorConfig, VisionConfig
from tessera.nn.spec import CHANNELS, TextSpec, linear_shapes, norm_shapes


def expected(config: ModelConfig) -> Shapes:
    """Every tensor that the checkpoint must have, vision layers behind ``select_layer`` included."""
    return (
        vision_shapes(config.vision, layers=config.vision.layers, final_norm=True)
        | projector_shapes(config.projector, config.vision, config.text)
        | config.text.shapes("text.")
    )


def used_for_vision(config: ModelConfig) -> Shapes:
    """The tensors that the vision module keeps."""
    vision = config.vision
    return vision_shapes(vision, layers=vision.layers_used, final_norm=vision.final_norm) | projector_shapes(
        config.projector, vision, config.text
    )


def vision_shapes(config: VisionConfig, *, layers: int, final_norm: bool) -> Shapes:
    """The encoder's tensors by canonical name, its first ``layers`` layers."""
    hidden, wide = config.layer.hidden, config.layer.intermediate
    shapes: Shapes = {
        "embeddings.patch_embedding.weight": (hidden, CHANNELS, config.patch_size, config.patch_size),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": (config.grid**2, hidden),
    }
    for layer in range(layers):
        stem = f"encoder.layers.{layer}."
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= norm_shapes(stem + norm, hidden)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear_shapes(f"{stem}self_attn.{projection}", hidden, hidden)
        shapes |= linear_shapes(f"{stem}mlp.fc1", hidden, wide)
        shapes |= linear_shapes(f"{stem}mlp.fc2", wide, hidden)
    if final_norm:
        shapes |= norm_shapes("post_layernorm", hidden)
    return {f"vision.{name}": shape for name, shape in shapes.items()}


def projector_shapes(config: ProjectorConfig, vision: VisionConfig, text: TextSpec) -> Shapes:
    """The projector's tensors by canonical name."""
    features, hidden = vision.layer.hidden * config.factor**2, text.layer.hidden
    first, second = ("projector.1", features, hidden), ("projector.3", hidden, hidden)
    return norm_shapes("projector.0", features) | linear_shapes(*first) | linear_shapes(*second)
