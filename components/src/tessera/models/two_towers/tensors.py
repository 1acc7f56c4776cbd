"""The tensors of a checkpoint of two towers: stored names, canonical names, shapes.

A canonical name is made of its part and its name inside the part: ``vision.layers.0.mlp.up_proj.weight``,
``text.norm.bias``.
"""

from __future__ import annotations

import re
from typing import Final

from tessera.checkpoint.weights import Shapes
from tessera.nn.spec import LayerSpec, linear_shapes, norm_shapes

# In their order; the parts come first.
_SPELLINGS: Final = (
    ("text_model.", "text."),
    ("vision_model.", "vision."),
    ("text_projection.", "text.head."),
    ("visual_projection.", "vision.projection."),
    (".embeddings.", "."),
    (".token_embedding.", ".embed_tokens."),
    (".position_embedding.", ".embed_positions."),
    (".patch_embedding.", ".patches.projection."),
    (".class_embedding", ".class_token"),
    (".encoder.layers.", ".layers."),
    (".layer_norm1.", ".input_layernorm."),
    (".layer_norm2.", ".post_attention_layernorm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".fc1.", ".up_proj."),
    (".fc2.", ".down_proj."),
    (".final_layer_norm.", ".norm."),
    (".pre_layrnorm.", ".pre_norm."),
    (".post_layernorm.", ".norm."),
    (".head.attention.in_proj_", ".head.in_proj."),
    (".head.attention.out_proj.", ".head.out_proj."),
    (".head.layernorm.", ".head.norm."),
)
# Scale and bias of the logits that compare the towers in training, and tables that are computed.
_UNUSED: Final = re.compile(r"(logit_scale|logit_bias|.*\.position_ids)$")


def canonical(name: str) -> str | None:
    """The canonical name of a stored tensor; None for one that no forward pass uses."""
    if _UNUSED.match(name):
        return None
    for stored, own in _SPELLINGS:
        name = name.replace(stored, own)
    return name


def stack_shapes(layer: LayerSpec, layers: int) -> Shapes:
    """A vision tower's layers, and the norm behind them."""
    return norm_shapes("vision.norm", layer.hidden) | layer.stacked(layers, "vision.layers.")


def pool_shapes(layer: LayerSpec) -> Shapes:
    """SigLIP's head: a query, attention, a norm and an MLP."""
    hidden, wide = layer.hidden, layer.intermediate
    return {
        "vision.head.probe": (1, 1, hidden),
        **linear_shapes("vision.head.in_proj", hidden, 3 * hidden),
        **linear_shapes("vision.head.out_proj", hidden, hidden),
        **norm_shapes("vision.head.norm", hidden),
        **linear_shapes("vision.head.mlp.up_proj", hidden, wide),
        **linear_shapes("vision.head.mlp.down_proj", wide, hidden),
    }
