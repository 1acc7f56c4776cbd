"""Ministral 3's decoder as a section of ``config.json`` describes it; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tessera.checkpoint.declared import Declared
from tessera.checkpoint.section import Section
from tessera.models.decoder import max_positions, read_layer, read_rope
from tessera.models.llama.config import POOLINGS
from tessera.nn.spec import Pooling, TextSpec

# Those of transformers' Ministral3Config: a section inside another one is saved without what equals them.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
}
_DEFAULT_ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def with_defaults(section: Section) -> Section:
    """Return the section with the values that its keys have where they are absent."""
    values = {key: value for key, value in section.values.items() if value is not None}
    if not section.has("rope_parameters") and not section.has("rope_scaling"):
        values["rope_parameters"] = _DEFAULT_ROPE
    return replace(section, values={**_DEFAULTS, **values})


def read_text(section: Section, *, pooling: Pooling) -> TextSpec:
    """Read the decoder, causal unless ``is_causal`` is false, as transformers' ``Ministral3Model`` is.

    ``section`` has its defaults. Raises ``CheckpointError`` for a window that is narrower than the positions.
    """
    if section.has("sliding_window") and section.integer("sliding_window") < max_positions(section):
        raise section.error("sliding_window", "is set; attention within a window is not supported")
    return TextSpec(
        vocab_size=section.integer("vocab_size"),
        layers=section.integer("num_hidden_layers"),
        layer=read_layer(section, activations=("silu",), causal=section.flag("is_causal", True)),
        rope=read_rope(section, kinds=("default", "linear", "llama3", "yarn")),
        pooling=pooling,
    )


def read_pooling(config: Section, declared: Declared, otherwise: str) -> Pooling:
    """Return the pooling of ``config.json``, else ``otherwise``; that of ``modules.json`` wins over both.

    Raises ``CheckpointError`` where none of them names one: the files may be those of a language model.
    """
    known = tuple(POOLINGS)
    if config.has("pooling") or declared.pooling is not None or otherwise != "declared":
        return POOLINGS[config.string("pooling", otherwise if otherwise in known else known[0], among=known)]
    raise config.error(
        "pooling",
        "is missing, and no modules.json has a Pooling: it may be a language model. The model option pooling"
        f" takes it for an embedder, as one of {', '.join(known)}",
    )
