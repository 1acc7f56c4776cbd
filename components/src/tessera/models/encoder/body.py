"""What the files of encoders of the BERT kind call their settings and tensors; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from tessera.checkpoint.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Names in the files of one kind of encoder.

    ``first`` and ``last`` are the tokens around a text where ``tokenizer_config.json`` does not name them,
    and ``stems`` what may stand before the names of tensors. ``hidden`` to ``activation`` are keys of
    ``config.json``, and ``depth`` the layers of one that does not count them. With ``own_eps`` it has the
    norms' epsilon, and with ``typed`` tokens have types.

    Then come names of modules: ``embeddings``, those of a ``layer`` below ``layer_stem`` and its number, and
    the ``norm`` behind it; those of a ``score``, whose first product has ``score_activation`` behind it; and
    the ``vocabulary``'s: a product, its norm, the decoder, and what has the decoder's bias where it has none.
    """

    first: str
    last: str
    stems: tuple[str, ...]
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    depth: int = 12
    intermediate: str = "intermediate_size"
    activation: str = "hidden_act"
    own_eps: bool = True
    typed: bool = True
    embeddings: Mapping[str, str]
    layer_stem: str
    layer: Mapping[str, str]
    norm: str
    score: tuple[str, str]
    score_activation: Literal["tanh", "relu"] = "tanh"
    vocabulary: tuple[str, str, str, str] | None = None


_EMBEDDINGS: Final = {
    "embeddings.word_embeddings.": "embed_tokens.",
    "embeddings.position_embeddings.": "embed_positions.",
    "embeddings.LayerNorm.": "layers.0.input_layernorm.",
}
_TYPES: Final = {"embeddings.token_type_embeddings.": "embed_types."}
_LAYER: Final = {
    "attention.self.query.": "self_attn.q_proj.",
    "attention.self.key.": "self_attn.k_proj.",
    "attention.self.value.": "self_attn.v_proj.",
    "attention.output.dense.": "self_attn.o_proj.",
    "attention.output.LayerNorm.": "post_attention_layernorm.",
    "intermediate.dense.": "mlp.up_proj.",
    "output.dense.": "mlp.down_proj.",
}

BERT: Final = Body(
    first="[CLS]",
    last="[SEP]",
    stems=("bert.",),
    embeddings={**_EMBEDDINGS, **_TYPES},
    layer_stem="encoder.layer.",
    layer=_LAYER,
    norm="output.LayerNorm.",
    score=("pooler.dense.", "classifier."),
    vocabulary=(
        "cls.predictions.transform.dense.",
        "cls.predictions.transform.LayerNorm.",
        "cls.predictions.decoder.",
        "cls.predictions.",
    ),
)

ROBERTA: Final = replace(
    BERT,
    first="<s>",
    last="</s>",
    stems=("roberta.", "xlm-roberta.", "camembert."),
    score=("classifier.dense.", "classifier.out_proj."),
    vocabulary=None,
)

DISTILBERT: Final = Body(
    first="[CLS]",
    last="[SEP]",
    stems=("distilbert.",),
    hidden="dim",
    heads="n_heads",
    layers="n_layers",
    depth=6,
    intermediate="hidden_dim",
    activation="activation",
    own_eps=False,
    typed=False,
    embeddings=_EMBEDDINGS,
    layer_stem="transformer.layer.",
    layer={
        "attention.q_lin.": "self_attn.q_proj.",
        "attention.k_lin.": "self_attn.k_proj.",
        "attention.v_lin.": "self_attn.v_proj.",
        "attention.out_lin.": "self_attn.o_proj.",
        "sa_layer_norm.": "post_attention_layernorm.",
        "ffn.lin1.": "mlp.up_proj.",
        "ffn.lin2.": "mlp.down_proj.",
    },
    norm="output_layer_norm.",
    score=("pre_classifier.", "classifier."),
    score_activation="relu",
    vocabulary=("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "vocab_projector."),
)

_BODIES: Final[Mapping[str, Body]] = {
    "bert": BERT,
    "distilbert": DISTILBERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
}


def body_of(config: Section) -> Body:
    """Return the body that ``model_type`` names, by which a family was found."""
    return _BODIES[config.string("model_type", among=tuple(_BODIES))]
