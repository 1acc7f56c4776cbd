"""Reads what every text backbone says of itself in ``config.json``; torch-free.

A key that may be absent takes the default of the class that would have read it in ``transformers``, because
saving drops values that equal those defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from tessera.checkpoint.section import Section
from tessera.nn.spec import LayerSpec, RopeSpec, RopeType

_CONTEXT: Final = "original_max_position_embeddings"


def read_layer(
    section: Section,
    *,
    activations: Sequence[str],
    head_dim: int | None = None,
    kv_heads: int | None = None,
    **rest: Any,
) -> LayerSpec:
    """A gated layer with RMSNorm; ``rest`` are its fields that no file says.

    ``head_dim`` and ``kv_heads`` are defaults, None for the hidden size over the heads and as many as these.
    Raises ``CheckpointError``.
    """
    heads = section.integer("num_attention_heads", 32)
    kv_heads = section.integer("num_key_value_heads", kv_heads or heads)
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


def check_architecture(config: Section, names: Sequence[str]) -> str:
    """Return the architecture, by default the first of ``names``; raises ``CheckpointError`` for others."""
    named = config.values.get("architectures") or [names[0]]
    for name in names:
        if named == [name]:
            return name
    raise config.error(
        "architectures", f"must be {' or '.join(str([name]) for name in names)}, not {named!r}"
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
    """The object of RoPE: ``rope_scaling``, saved as ``rope_parameters`` by ``transformers`` from 5.0 on.

    Raises ``CheckpointError`` where both are there and differ.
    """
    keys = ("rope_parameters", "rope_scaling")
    if all(map(section.has, keys)) and _rope_values(section, keys[0]) != _rope_values(section, keys[1]):
        raise section.error("rope_scaling", "and rope_parameters are both there and differ")
    for key in keys:
        if section.has(key):
            return section.section(key)
    return Section(path=section.path, prefix=section.prefix, values={})


def read_theta(rope: Section, section: Section, default: float | None) -> float:
    """Theta, which may stand in the object of RoPE or above it."""
    if not rope.has("rope_theta"):
        return section.number("rope_theta", default)
    return rope.number("rope_theta")


def rope_type(rope: Section, among: Sequence[str]) -> str:
    """The kind of scaling, whose key was ``type`` once."""
    key = "type" if rope.has("type") and not rope.has("rope_type") else "rope_type"
    return rope.string(key, "default", among=among)


def read_rope(section: Section, *, kinds: Sequence[RopeType]) -> RopeSpec:
    """RoPE of one axis, whose scaling is one of ``kinds``; raises ``CheckpointError``.

    The keys are those of transformers' ``modeling_rope_utils``, and ``llama_4_scaling_beta`` of Ministral 3.
    """
    rope = rope_section(section)
    kind = cast(RopeType, rope_type(rope, kinds))
    if rope.number("partial_rotary_factor", section.number("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.error("partial_rotary_factor", "is not supported unless it is 1")
    fields: dict[str, Any] = {"theta": read_theta(rope, section, 10000.0)}
    beta = _number_or_zero(rope, "llama_4_scaling_beta")
    if beta or kind in ("llama3", "yarn"):
        # Above the object it wins where it scales.
        above = section if kind != "default" and section.has(_CONTEXT) else rope
        fields["original_max_positions"] = above.integer(_CONTEXT)
        fields["query_beta"] = beta
    if kind != "default":
        fields["factor"] = rope.number("factor")
    if kind == "llama3":
        fields |= {key: rope.number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields |= _yarn(rope)
    return RopeSpec(rope_type=kind, **fields)


def _yarn(rope: Section) -> dict[str, Any]:
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast <= slow:
        raise rope.error("beta_fast", f"must be above beta_slow {slow}, not {fast}")
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "mscale": _number_or_zero(rope, "mscale"),
        "mscale_all_dim": _number_or_zero(rope, "mscale_all_dim"),
        "attention_factor": rope.number("attention_factor") if rope.has("attention_factor") else None,
        "truncate": rope.flag("truncate", True),
    }


def _number_or_zero(section: Section, key: str) -> float:
    """A number that turns something off by being 0 or absent."""
    return section.number(key) if section.values.get(key) else 0.0


def _rope_values(section: Section, key: str) -> dict[str, Any]:
    """What an object of RoPE holds, whose theta may stand above it and whose kind has an older name."""
    values = dict(section.section(key).values)
    values.setdefault("rope_theta", section.values.get("rope_theta"))
    if "rope_type" in values:
        values.pop("type", None)
    elif "type" in values:
        values["rope_type"] = values.pop("type")
    return {name: value for name, value in values.items() if value is not None}
