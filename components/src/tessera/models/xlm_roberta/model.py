"""Checkpoints of RoBERTa and XLM-RoBERTa: vectors, ColBERT and scores of pairs; opening needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tessera.checkpoint.declared import STANFORD
from tessera.checkpoint.section import Section
from tessera.checkpoint.weight_names import HEAD_FILES
from tessera.models.base import Family, Int32Array, Output
from tessera.models.encoder.colbert import ColbertModel
from tessera.models.encoder.model import ColbertOptions, EncoderModel, Options, PairOptions
from tessera.models.encoder.pairs import CrossEncoder
from tessera.models.options import OptionsFamily
from tessera.models.xlm_roberta.heads import M3Heads

if TYPE_CHECKING:
    from tessera.nn.text import TextTower

_TYPES: Final = ("xlm-roberta", "roberta", "camembert")
_NAMES: Final = ("XLMRoberta", "Roberta", "Camembert")
_ENCODERS: Final = tuple(f"{name}{task}" for name in _NAMES for task in ("Model", "ForMaskedLM"))


class XlmRoberta(EncoderModel):
    """Implements ``tessera.models.base.Model``."""

    family = "xlm_roberta"
    files = (*EncoderModel.files, *HEAD_FILES)
    _heads: M3Heads | None = None

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, options)
        self._heads = M3Heads.find(path, self._tokenizer)

    @property
    def outputs(self) -> Sequence[Output]:
        """The pooled vector, and what the files of BGE M3's heads give beside it."""
        heads = self._heads
        return (self.output,) if heads is None else (self.output, *heads.outputs(self.state_width))

    @property
    def token_weights(self) -> Output | None:
        """The output of each token's own weight, where there is a sparse one."""
        return None if self._heads is None else self._heads.token_weights

    def load_text(self, *, dtype: str, device: str) -> TextTower:
        """Read the tower's tensors and the heads'; raises ``CheckpointError``."""
        tower = super().load_text(dtype=dtype, device=device)
        if self._heads is None:
            return tower
        return tower.give(self.output.name, self._heads.load(self.state_width, device=device))

    def text_nbytes(self, dtype: str) -> int:
        heads = 0 if self._heads is None else self._heads.nbytes
        return super().text_nbytes(dtype) + heads

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        """Beside the tower's, float32 states and token vectors where there are heads."""
        heads = 0 if self._heads is None else 8 * self.state_width * tokens
        return super().text_activation_nbytes(dtype, tokens) + heads

    def unused_positions(self, config: Section) -> int:
        """Return how many rows of the positions no token has: those up to padding's."""
        self._pad = config.integer("pad_token_id", 1, at_least=0)
        return self._pad + 1

    def places(self, tokens: Int32Array) -> Int32Array:
        """int32 ``[tokens]``: counted from behind padding's; a token that is padding's has its row.

        Such a token is not counted, as in the reference.
        """
        counted = tokens != self._pad
        places: Int32Array = np.cumsum(counted, dtype=np.int32) * counted + np.int32(self._pad)
        return places


class XlmRobertaColbert(ColbertModel, XlmRoberta):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token."""

    family = "xlm_roberta_colbert"
    mask, unknown = "<mask>", "<unk>"
    files = ColbertModel.files


class XlmRobertaRerank(CrossEncoder, XlmRoberta):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "xlm_roberta_rerank"
    version = 4
    separators = 2
    typed = False


FAMILY: Family = OptionsFamily(
    model_types=_TYPES,
    hub_models=(
        "BAAI/bge-m3",
        "intfloat/multilingual-e5-base",
        "intfloat/multilingual-e5-large",
        "Snowflake/snowflake-arctic-embed-l-v2.0",
    ),
    options=Options,
    opened=XlmRoberta,
    architectures=_ENCODERS,
)

COLBERT: Family = OptionsFamily(
    model_types=_TYPES,
    options=ColbertOptions,
    opened=XlmRobertaColbert,
    architectures=(*_ENCODERS, STANFORD),
    task="tokens",
)

RERANK: Family = OptionsFamily(
    model_types=_TYPES,
    hub_models=("BAAI/bge-reranker-v2-m3", "BAAI/bge-reranker-base"),
    options=PairOptions,
    opened=XlmRobertaRerank,
    architectures=tuple(f"{name}ForSequenceClassification" for name in _NAMES),
)
