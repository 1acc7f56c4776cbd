"""Reads what every text backbone says of itself in ``config.json``; torch-free.

A key that may be absent takes the default of the class that would have read it in ``transformers``, because
saving drops values that equal those defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.checkpoint.section import Section
from tessera.nn.spec import LayerSpec


def read_layer(
    section: Section, *, activations: Sequence[str], head_dim: int | None = None, **rest: Any
) -> LayerSpec:
    """A gated layer with RMSNorm; ``rest`` are its fields that no file says.

    ``head_dim`` is the default, None for the hidden size over the heads. Raises ``CheckpointError``.
    """
    heads = section.integer("num_attention_heads", 32)
    kv_heads = section.integer("num_key_value_heads", heads)
    hidden = section.integer("hidden_size")
    if heads % kv_heads:
        raise section.error("num_attention_heads", f"must be a multiple of num_key_value_heads {kv_heads}")
    if head_dim is None and not section.has("head_dim") and hidden % heads:
        raise section.error("hidden_size", f"must be a multiple of num_attention_heads {heads}")
    head_dim = section.integer("head_dim", head_dim or max(hidden // heads, 1))
    if head_dim % 2:
        raise section.error("head_dim", f"must be even for rotary positions, not {head_dim}")
    return LayerSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=section.integer("intermediate_size"),
        activation=section.string("hidden_act", "silu", among=activations),
        norm="rms",
        eps=section.number("rms_norm_eps", 1e-6),
        gated=True,
        **rest,
    )


def refuse_flags(section: Section, *keys: str, why: str) -> None:
    """Raise ``CheckpointError`` for the first of these that is true."""
    for key in keys:
        if section.flag(key, False):
            raise section.error(key, f"is true{why}")


def max_positions(section: Section) -> int:
    """How many positions the backbone was pretrained for, often far more than it was tuned on."""
    return section.integer("max_position_embeddings")


def rope_section(section: Section) -> Section:
    """The object of RoPE: ``rope_scaling``, saved as ``rope_parameters`` by ``transformers`` from 5.0 on."""
    for key in ("rope_parameters", "rope_scaling"):
        if section.has(key):
            return section.section(key)
    return Section(path=section.path, prefix=section.prefix, values={})


def rope_type(rope: Section, among: Sequence[str]) -> str:
    """The kind of scaling, whose key was ``type`` once."""
    key = "type" if rope.has("type") and not rope.has("rope_type") else "rope_type"
    return rope.string(key, "default", among=among)
