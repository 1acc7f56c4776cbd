"""Checkpoints of DistilBERT: embedders, cross-encoders and SPLADE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.section import CONFIG_FILE
from tessera_tools.random_checkpoint.encoder import (
    FULL,
    RERANK_TINY,
    SPLADE_TINY,
    TINY,
    EncoderSpec,
)
from tessera_tools.random_checkpoint.spec import Sizes
from tessera_tools.random_checkpoint.weights import RandomTensor

_KEYS: Final = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
_WITHOUT: Final = ("layer_norm_eps", "type_vocab_size", "position_embedding_type")
# Parts of BERT's names, longer ones first.
_NAMES: Final = {
    "encoder.layer.": "transformer.layer.",
    "attention.self.query.": "attention.q_lin.",
    "attention.self.key.": "attention.k_lin.",
    "attention.self.value.": "attention.v_lin.",
    "attention.output.dense.": "attention.out_lin.",
    "attention.output.LayerNorm.": "sa_layer_norm.",
    "intermediate.dense.": "ffn.lin1.",
    "output.dense.": "ffn.lin2.",
    "output.LayerNorm.": "output_layer_norm.",
    "pooler.dense.": "pre_classifier.",
    "cls.predictions.transform.dense.": "vocab_transform.",
    "cls.predictions.transform.LayerNorm.": "vocab_layer_norm.",
    "cls.predictions.decoder.": "vocab_projector.",
    "cls.predictions.": "vocab_projector.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBertSpec:
    """A checkpoint of DistilBERT with the sizes and the head of one of BERT.

    It has no token types, and a pooler only below a score, where it is called otherwise.
    """

    bert: EncoderSpec
    prefix: str = ""

    @property
    def shards(self) -> int:
        return self.bert.shards

    @property
    def _without(self) -> tuple[str, ...]:
        """Beginnings of BERT's names of what it does not have; its decoder has one bias."""
        pooler = () if self.bert.scores else ("pooler.",)
        bias = ("cls.predictions.bias",) if self.bert.untied else ()
        return ("embeddings.token_type", *pooler, *bias)

    def files(self, dtype: str, seed: int) -> dict[str, Any]:
        files = self.bert.files(dtype, seed)
        config = {
            _KEYS.get(key, key): value for key, value in files[CONFIG_FILE].items() if key not in _WITHOUT
        }
        (architecture,) = config["architectures"]
        config |= {"architectures": [f"Distil{architecture}"], "model_type": "distilbert"}
        return files | {CONFIG_FILE: config}

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        for tensor in replace(self.bert, prefix="").tensors(directory):
            name = tensor.name
            if any(name.startswith(part) for part in self._without):
                continue
            for part, own in _NAMES.items():
                name = name.replace(part, own)
            of_head = name.startswith(("vocab_", "pre_classifier.", "classifier."))
            yield replace(tensor, name=name if of_head else f"{self.prefix}{name}")


_BASE: Final = replace(FULL, layers=6)

TINY_DISTILLED = DistilBertSpec(bert=TINY)
RERANK_TINY_DISTILLED = DistilBertSpec(bert=RERANK_TINY, prefix="distilbert.")
SPLADE_TINY_DISTILLED = DistilBertSpec(bert=SPLADE_TINY, prefix="distilbert.")
SPLADE_FULL_DISTILLED = DistilBertSpec(bert=replace(_BASE, masked=True, prompted=False), prefix="distilbert.")

SIZES: Final = Sizes(tiny=TINY_DISTILLED, full=DistilBertSpec(bert=_BASE))
RERANK_SIZES: Final = Sizes(
    tiny=RERANK_TINY_DISTILLED,
    full=DistilBertSpec(
        bert=replace(_BASE, scores=True, activation=RERANK_TINY.activation), prefix="distilbert."
    ),
)
SPLADE_SIZES: Final = Sizes(tiny=SPLADE_TINY_DISTILLED, full=SPLADE_FULL_DISTILLED)
