"""The bidirectional Llama backbone as a section of ``config.json`` describes it; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, get_args

from tessera.checkpoint.section import Section
from tessera.models.decoder import check_architecture, read_layer, read_rope, refuse_flags
from tessera.nn.spec import Activation, HeadSpec, Pooling, TextSpec

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

    Raises ``CheckpointError`` for what no such backbone has: another architecture, biases, causal attention.
    """
    check_architecture(section, architectures)
    refuse_causal(section)
    refuse_flags(section, "attention_bias", "mlp_bias", why="; biases in the backbone are not supported")
    layer = read_layer(section, activations=ACTIVATIONS)
    return TextSpec(
        vocab_size=section.integer("vocab_size"),
        layers=section.integer("num_hidden_layers"),
        layer=layer,
        rope=read_rope(section, kinds=("default", "linear", "llama3")),
        pooling=pooling,
        head=head,
    )


def refuse_causal(section: Section) -> None:
    """Raise ``CheckpointError`` for causal attention, a declaration that the models' own code never reads."""
    refuse_flags(section, "is_causal", why="; causal backbones are not supported")


def read_score_head(config: Section) -> HeadSpec:
    """The head of a reranker, of one label; raises ``CheckpointError`` for one that has more."""
    labels = config.section("id2label").values if config.has("id2label") else {}
    # By default transformers makes two.
    count = len(labels) or config.integer("num_labels", 2)
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
