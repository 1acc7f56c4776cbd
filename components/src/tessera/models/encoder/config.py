"""An encoder of the BERT kind as its files describe it; torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, get_args

from tessera.checkpoint.section import Section
from tessera.models.decoder import refuse_flags
from tessera.nn.spec import Activation, EncoderSpec, HeadSpec, LayerSpec, Pooling

_ACTIVATIONS: Final[tuple[str, ...]] = get_args(Activation)


def read_encoder(config: Section, *, pooling: Pooling, head: HeadSpec | None = None) -> EncoderSpec:
    """Read the encoder; a key that is absent has the default of its class in ``transformers``.

    Raises ``CheckpointError`` for what no such encoder has: other positions, causal attention, code of its
    own, which the checkpoints of another model have that call themselves BERT.
    """
    refuse_flags(config, "is_decoder", "add_cross_attention", why="; decoders are not supported")
    config.string("position_embedding_type", "absolute", among=("absolute",))
    if config.has("auto_map"):
        raise config.error("auto_map", f"names code that is not run: {config.values['auto_map']}")
    hidden = config.integer("hidden_size", 768)
    heads = config.integer("num_attention_heads", 12)
    if hidden % heads:
        raise config.error("hidden_size", f"must be a multiple of num_attention_heads {heads}")
    return EncoderSpec(
        vocab_size=config.integer("vocab_size"),
        layers=config.integer("num_hidden_layers", 12),
        layer=LayerSpec.encoder(
            hidden,
            heads,
            config.integer("intermediate_size", 3072),
            activation=config.string("hidden_act", "gelu", among=_ACTIVATIONS),
            eps=config.number("layer_norm_eps", 1e-12),
            post_norm=True,
        ),
        pooling=pooling,
        head=head,
        positions=config.integer("max_position_embeddings", 512),
        types=config.integer("type_vocab_size", 2),
    )


class Names:
    """From the names in files of BERT and RoBERTa to canonical ones.

    ``stems`` may stand before every name, and ``head`` has the names of a classification head's two
    products; those of other heads, of poolers and of buffers have no use here.
    """

    _UNUSED: Final = re.compile(r"(embeddings\.position_ids$|pooler\.|cls\.|lm_head\.)")
    _EMBEDDINGS: Final = {
        "embeddings.word_embeddings.": "embed_tokens.",
        "embeddings.position_embeddings.": "embed_positions.",
        "embeddings.token_type_embeddings.": "embed_types.",
        "embeddings.LayerNorm.": "layers.0.input_layernorm.",
    }
    _LAYER: Final = {
        "attention.self.query.": "self_attn.q_proj.",
        "attention.self.key.": "self_attn.k_proj.",
        "attention.self.value.": "self_attn.v_proj.",
        "attention.output.dense.": "self_attn.o_proj.",
        "attention.output.LayerNorm.": "post_attention_layernorm.",
        "intermediate.dense.": "mlp.up_proj.",
        "output.dense.": "mlp.down_proj.",
    }
    # Files of the first years.
    _ENDS: Final = {"gamma": "weight", "beta": "bias"}

    def __init__(self, layers: int, stems: Sequence[str], head: Mapping[str, str]) -> None:
        self._stem = re.compile("|".join(map(re.escape, stems)))
        self._fixed = {**self._EMBEDDINGS, **head}
        for number in range(layers):
            before = f"encoder.layer.{number}."
            self._fixed |= {before + name: f"layers.{number}.{own}" for name, own in self._LAYER.items()}
            # The norm behind a layer is the first of the next one, or the last of all.
            behind = f"layers.{number + 1}.input_layernorm." if number + 1 < layers else "norm."
            self._fixed[f"{before}output.LayerNorm."] = behind

    def __call__(self, name: str) -> str | None:
        """Return the canonical name, None for a tensor without use, or an unknown name as it is."""
        stem = self._stem.match(name)
        module, _, end = (name[stem.end() :] if stem else name).rpartition(".")
        own = self._fixed.get(f"{module}.")
        if own is not None:
            return f"text.{own}{self._ENDS.get(end, end)}"
        return None if self._UNUSED.match(f"{module}.{end}") else name
