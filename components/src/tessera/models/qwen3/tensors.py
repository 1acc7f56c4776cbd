"""The decoder's tensors: names inside it, and shapes."""

from __future__ import annotations

from tessera.checkpoint.weights import Shapes
from tessera.models.qwen3.config import TextConfig


def text_shapes(config: TextConfig) -> Shapes:
    """Every tensor of the decoder, by its canonical name: ``text.`` and its name in the decoder."""
    hidden, wide = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: Shapes = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        stem = f"layers.{layer}."
        shapes |= {
            f"{stem}input_layernorm.weight": (hidden,),
            f"{stem}self_attn.q_proj.weight": (queries, hidden),
            f"{stem}self_attn.k_proj.weight": (keys, hidden),
            f"{stem}self_attn.v_proj.weight": (keys, hidden),
            f"{stem}self_attn.o_proj.weight": (hidden, queries),
            f"{stem}self_attn.q_norm.weight": (config.head_dim,),
            f"{stem}self_attn.k_norm.weight": (config.head_dim,),
            f"{stem}post_attention_layernorm.weight": (hidden,),
            f"{stem}mlp.gate_proj.weight": (wide, hidden),
            f"{stem}mlp.up_proj.weight": (wide, hidden),
            f"{stem}mlp.down_proj.weight": (hidden, wide),
        }
    shapes["norm.weight"] = (hidden,)
    return {f"text.{name}": shape for name, shape in shapes.items()}
