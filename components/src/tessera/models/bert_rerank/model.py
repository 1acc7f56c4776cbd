"""A checkpoint of BERT that scores pairs as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.bert.model import Bert
from tessera.models.encoder.model import PairOptions
from tessera.models.encoder.pairs import CrossEncoder
from tessera.models.options import OptionsFamily


class BertRerank(CrossEncoder, Bert):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "bert_rerank"
    version = 2


FAMILY: Family = OptionsFamily(
    name=BertRerank.family,
    model_types=("bert", "distilbert"),
    hub_models=("cross-encoder/ms-marco-MiniLM-L6-v2",),
    options=PairOptions,
    opened=BertRerank,
    architectures=("BertForSequenceClassification", "DistilBertForSequenceClassification"),
)
