"""The bidirectional Llama backbone as a section of ``config.json`` describes it; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, cast, get_args

from tessera.checkpoint.section import Section
from tessera.models.decoder import read_layer, refuse_flags, rope_section, rope_type
from tessera.nn.spec import Activation, HeadSpec, Pooling, RopeSpec, RopeType, TextSpec

ACTIVATIONS: Final[tuple[str, ...]] = get_args(Activation)
POOLINGS: Final[dict[str, Pooling]] = {"avg": "mean", "last": "last", "cls": "first"}
"""What configurations call the ways of pooling."""

EMBEDDING: Final = "LlamaBidirectionalModel"
SCORING: Final = "LlamaBidirectionalForSequenceClassification"


def read_backbone(
    section: Section,
    *,
    pooling: Pooling,
    architectures: Sequence[str] = (EMBEDDING,),
    head: HeadSpec | None = None,
) -> TextSpec:
    """Read the backbone, whose ``architectures`` is one of those given, or is not there.

    Raises ``CheckpointError`` for what no such backbone has: another architecture, biases.
    """
    names = section.values.get("architectures") or [architectures[0]]
    if names not in [[name] for name in architectures]:
        allowed = " or ".join(str([name]) for name in architectures)
        raise section.error("architectures", f"must be {allowed}, not {names!r}")
    refuse_flags(section, "attention_bias", "mlp_bias", why="; biases in the backbone are not supported")
    layer = read_layer(section, activations=ACTIVATIONS)
    return TextSpec(
        vocab_size=section.integer("vocab_size"),
        layers=section.integer("num_hidden_layers"),
        layer=layer,
        rope=_rope(section),
        pooling=pooling,
        head=head,
    )


def read_score_head(config: Section) -> HeadSpec:
    """The head of a reranker, of one label; raises ``CheckpointError`` for one that has more."""
    labels = config.section("id2label").values if config.has("id2label") else {}
    count = len(labels) or config.integer("num_labels", 1)
    if count != 1:
        raise config.error("id2label", f"must have one label, a score; it has {count}")
    temperature = config.number("temperature", 1.0)
    if temperature <= 0:
        raise config.error("temperature", f"must be above 0, not {temperature}")
    return HeadSpec(width=1, temperature=temperature)


def read_dimensions(config: Section, hidden: int, *, default: Collection[int] = ()) -> frozenset[int]:
    """Configured widths beside ``hidden``, else those of ``default`` that are narrower.

    ``is_matryoshka`` without a list allows every width.
    """
    widths = config.integers("matryoshka_dimensions")
    if not all(1 <= width <= hidden for width in widths):
        raise config.error("matryoshka_dimensions", f"must lie in 1..{hidden}: {list(widths)}")
    if not widths and config.flag("is_matryoshka", False):
        return frozenset(range(1, hidden))
    return frozenset(width for width in widths or default if width < hidden)


def _rope(section: Section) -> RopeSpec:
    keys = ("rope_parameters", "rope_scaling")
    if all(map(section.has, keys)) and _rope_values(section, keys[0]) != _rope_values(section, keys[1]):
        raise section.error("rope_scaling", "and rope_parameters are both there and differ")
    rope = rope_section(section)
    kind = cast(RopeType, rope_type(rope, ("default", "linear", "llama3")))
    if rope.number("partial_rotary_factor", section.number("partial_rotary_factor", 1.0)) != 1.0:
        raise rope.error("partial_rotary_factor", "is not supported unless it is 1")
    theta = rope.number("rope_theta", section.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(rope_type=kind, theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeSpec(rope_type=kind, theta=theta, factor=factor)
    return RopeSpec(
        rope_type=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def _rope_values(section: Section, key: str) -> dict[str, Any]:
    """What an object of RoPE holds, whose theta may stand above it and whose kind has an older name."""
    values = dict(section.section(key).values)
    values.setdefault("rope_theta", section.values.get("rope_theta"))
    if "rope_type" in values:
        values.pop("type", None)
    elif "type" in values:
        values["rope_type"] = values.pop("type")
    return {name: value for name, value in values.items() if value is not None}
