"""The decoder that all Qwen3 checkpoints have, as ``config.json`` describes it; torch-free.

A key that may be absent takes the default of the class in ``transformers`` that would have read it.
"""

from __future__ import annotations

from tessera.checkpoint.section import Section
from tessera.nn.spec import LayerSpec, RopeSpec, TextSpec


def read_text(section: Section, *, theta: float, sections: bool, levels: int = 0) -> TextSpec:
    """Read the decoder; ``theta`` is the default, ``sections`` says that positions have three axes.

    Raises ``CheckpointError`` for what no released Qwen3 embedding model has: biases, windows, scaled RoPE.
    """
    for key in ("attention_bias", "use_sliding_window"):
        if section.flag(key, False):
            raise section.error(key, "is true, which is not supported")
    heads = section.integer("num_attention_heads", 32)
    kv_heads = section.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise section.error("num_attention_heads", f"must be a multiple of num_key_value_heads {kv_heads}")
    head_dim = section.integer("head_dim", 128)
    if head_dim % 2:
        raise section.error("head_dim", f"must be even for rotary positions, not {head_dim}")
    layer = LayerSpec(
        hidden=section.integer("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=section.integer("intermediate_size"),
        activation=section.string("hidden_act", "silu", among=("silu",)),
        norm="rms",
        eps=section.number("rms_norm_eps", 1e-6),
        gated=True,
        causal=True,
        qk_norm=True,
    )
    rope = _rope(section)
    layers = section.integer("num_hidden_layers")
    if levels > layers:
        raise section.error("num_hidden_layers", f"is {layers}, but vision rows enter behind {levels} layers")
    return TextSpec(
        vocab_size=section.integer("vocab_size", 151936),
        layers=layers,
        layer=layer,
        rope=RopeSpec(
            theta=rope.number("rope_theta", section.number("rope_theta", theta)),
            sections=_sections(rope, head_dim) if sections else (),
            interleaved=sections,
        ),
        pooling="last",
        levels=levels,
    )


def max_positions(section: Section) -> int:
    """The longest input that the positions were trained for."""
    return section.integer("max_position_embeddings")


def _rope(section: Section) -> Section:
    """The object of RoPE: ``rope_scaling``, saved as ``rope_parameters`` by ``transformers`` from 5.0 on."""
    for key in ("rope_parameters", "rope_scaling"):
        if section.has(key):
            rope = section.section(key)
            rope.string("rope_type" if rope.has("rope_type") else "type", "default", among=("default",))
            return rope
    return Section(path=section.path, prefix=section.prefix, values={})


def _sections(rope: Section, head_dim: int) -> tuple[int, int, int]:
    if not rope.flag("mrope_interleaved", True):
        raise rope.error("mrope_interleaved", "is false; sections in blocks are not supported")
    found = rope.integers("mrope_section") or (24, 20, 20)
    half = head_dim // 2
    # Height and width each take every third frequency from the front.
    if len(found) != 3 or min(found) < 0 or sum(found) != half or 3 * max(found[1:]) > half:
        raise rope.error(
            "mrope_section", f"must be three counts that interleave to {half}, not {list(found)}"
        )
    return (found[0], found[1], found[2])
