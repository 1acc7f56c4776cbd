"""A checkpoint of RoBERTa or XLM-RoBERTa that scores pairs; opening needs no torch."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.encoder.model import PairOptions
from tessera.models.encoder.pairs import CrossEncoder
from tessera.models.options import OptionsFamily
from tessera.models.xlm_roberta.model import XlmRoberta


class XlmRobertaRerank(CrossEncoder, XlmRoberta):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "xlm_roberta_rerank"
    version = 2
    separators = 2
    typed = False


FAMILY: Family = OptionsFamily(
    name=XlmRobertaRerank.family,
    model_types=("xlm-roberta", "roberta", "camembert"),
    hub_models=("BAAI/bge-reranker-v2-m3", "BAAI/bge-reranker-base"),
    options=PairOptions,
    opened=XlmRobertaRerank,
    architectures=tuple(
        f"{name}ForSequenceClassification" for name in ("XLMRoberta", "Roberta", "Camembert")
    ),
)
