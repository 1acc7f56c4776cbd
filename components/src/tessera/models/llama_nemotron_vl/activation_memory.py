"""How much memory a forward pass takes beside its weights: the tensors alive at its widest point.

Attention is computed without its score matrix by every kernel in use, so what counts is linear in tokens:
the residual stream, a norm's output, and the widest projection with its input.
"""

from __future__ import annotations

from tessera.models.llama_nemotron_vl.config import ModelConfig


def vision_activations(config: ModelConfig, tiles: int) -> int:
    """Elements alive at the widest point of ``tiles`` through the encoder and the projector."""
    vision = config.vision
    patches = tiles * vision.grid**2
    residual = 2 * vision.hidden
    # q, k and v; their contiguous copies for the kernel; and its output
    attention = 7 * vision.hidden
    mlp = vision.hidden + 2 * vision.intermediate
    # The pixels as bytes, in float32 before and after normalising, whatever the module's type.
    pixels = 3 * vision.patch_features
    encoder = patches * max(residual + max(attention, mlp), vision.hidden + pixels)
    rows = tiles * config.tokens_per_tile
    projector = 3 * patches * vision.hidden + 3 * rows * config.text.hidden
    return max(encoder, projector)


def text_activations(config: ModelConfig, tokens: int) -> int:
    """Elements alive at the widest point of ``tokens`` packed tokens through the backbone."""
    text = config.text
    residual = 2 * text.hidden
    attention = 2 * (text.heads + 2 * text.kv_heads) * text.head_dim + 3 * text.heads * text.head_dim
    mlp = text.hidden + 4 * text.intermediate
    return tokens * (residual + max(attention, mlp))
