"""Checkpoints of BERT: dense vectors, ColBERT's vectors of each token, and scores of pairs; torch-free."""

from __future__ import annotations

from tessera.checkpoint.declared import STANFORD
from tessera.models.base import Family
from tessera.models.encoder.colbert import ColbertModel
from tessera.models.encoder.model import ColbertOptions, EncoderModel, Options, PairOptions
from tessera.models.encoder.pairs import CrossEncoder
from tessera.models.options import OptionsFamily


class Bert(EncoderModel):
    """Implements ``tessera.models.base.Model``."""

    family = "bert"
    version = 3


class BertColbert(ColbertModel, Bert):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token."""

    family = "bert_colbert"
    mask, unknown = "[MASK]", "[UNK]"


class BertRerank(CrossEncoder, Bert):
    """Implements ``tessera.models.base.PairModel``; its output is the raw logit of a pair."""

    family = "bert_rerank"
    version = 4


FAMILY: Family = OptionsFamily(
    model_types=("bert", "distilbert"),
    hub_models=(
        "sentence-transformers/all-MiniLM-L6-v2",
        "BAAI/bge-base-en-v1.5",
        "intfloat/e5-base-v2",
        "intfloat/multilingual-e5-small",
        "sentence-transformers/msmarco-distilbert-base-tas-b",
    ),
    options=Options,
    opened=Bert,
    architectures=(
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "DistilBertModel",
        "DistilBertForMaskedLM",
    ),
)

COLBERT: Family = OptionsFamily(
    model_types=("bert",),
    hub_models=("colbert-ir/colbertv2.0", "answerdotai/answerai-colbert-small-v1"),
    options=ColbertOptions,
    opened=BertColbert,
    architectures=("BertModel", "BertForMaskedLM", "BertForPreTraining", STANFORD),
    task="tokens",
)

RERANK: Family = OptionsFamily(
    model_types=("bert", "distilbert"),
    hub_models=("cross-encoder/ms-marco-MiniLM-L6-v2",),
    options=PairOptions,
    opened=BertRerank,
    architectures=("BertForSequenceClassification", "DistilBertForSequenceClassification"),
)
