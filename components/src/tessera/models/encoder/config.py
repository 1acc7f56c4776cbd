"""An encoder of the BERT kind as its files describe it; torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, get_args

from tessera.checkpoint.section import Section
from tessera.models.decoder import refuse_flags
from tessera.models.encoder.body import Body
from tessera.nn.spec import Activation, EncoderSpec, HeadSpec, LayerSpec, Pooling

_ACTIVATIONS: Final[tuple[str, ...]] = get_args(Activation)
_EPS: Final = 1e-12


def read_encoder(
    config: Section, body: Body, *, pooling: Pooling, head: HeadSpec | None = None
) -> EncoderSpec:
    """Read the encoder; a key that is absent has the default of its class in ``transformers``.

    Raises ``CheckpointError`` for what no such encoder has: other positions, causal attention, code of its
    own, which the checkpoints of another model have that call themselves BERT.
    """
    refuse_flags(config, "is_decoder", "add_cross_attention", why="; decoders are not supported")
    config.string("position_embedding_type", "absolute", among=("absolute",))
    if config.has("auto_map"):
        raise config.error("auto_map", f"names code that is not run: {config.values['auto_map']}")
    hidden = config.integer(body.hidden, 768)
    heads = config.integer(body.heads, 12)
    if hidden % heads:
        raise config.error(body.hidden, f"must be a multiple of {body.heads} {heads}")
    return EncoderSpec(
        vocab_size=config.integer("vocab_size"),
        layers=config.integer(body.layers, body.depth),
        layer=LayerSpec.encoder(
            hidden,
            heads,
            config.integer(body.intermediate, 3072),
            activation=config.string(body.activation, "gelu", among=_ACTIVATIONS),
            eps=config.number("layer_norm_eps", _EPS) if body.own_eps else _EPS,
            post_norm=True,
        ),
        pooling=pooling,
        head=head,
        positions=config.integer("max_position_embeddings", 512),
        types=config.integer("type_vocab_size", 2) if body.typed else 0,
    )


class Names:
    """From the names in files of a body to canonical ones.

    ``head`` has the names of a head's modules; those of other heads, of poolers and of buffers have no use
    here.
    """

    _UNUSED: Final = re.compile(
        r"(embeddings\.position_ids$|pooler\.|cls\.|lm_head\.|vocab_(transform|layer_norm|projector)\.)"
    )
    # Files of the first years.
    _ENDS: Final = {"gamma": "weight", "beta": "bias"}

    def __init__(self, layers: int, body: Body, head: Mapping[str, str] = {}) -> None:
        self._stem = re.compile("|".join(map(re.escape, body.stems)))
        self._fixed = {**body.embeddings, **head}
        for number in range(layers):
            before = f"{body.layer_stem}{number}."
            self._fixed |= {before + name: f"layers.{number}.{own}" for name, own in body.layer.items()}
            # The norm behind a layer is the first of the next one, or the last of all.
            behind = f"layers.{number + 1}.input_layernorm." if number + 1 < layers else "norm."
            self._fixed[f"{before}{body.norm}"] = behind

    def __call__(self, name: str) -> str | None:
        """Return the canonical name, None for a tensor without use, or an unknown name as it is."""
        stem = self._stem.match(name)
        module, _, end = (name[stem.end() :] if stem else name).rpartition(".")
        own = self._fixed.get(f"{module}.")
        if own is not None:
            return f"text.{own}{self._ENDS.get(end, end)}"
        return None if self._UNUSED.match(f"{module}.{end}") else name
