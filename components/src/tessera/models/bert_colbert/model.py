"""A ColBERT checkpoint with the body of BERT as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from tessera.checkpoint.declared import STANFORD
from tessera.models.base import Family
from tessera.models.bert.model import Bert
from tessera.models.encoder.colbert import ColbertModel
from tessera.models.encoder.model import ColbertOptions
from tessera.models.options import OptionsFamily


class BertColbert(ColbertModel, Bert):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token."""

    family = "bert_colbert"
    mask, unknown = "[MASK]", "[UNK]"


FAMILY: Family = OptionsFamily(
    name=BertColbert.family,
    model_types=("bert",),
    hub_models=("colbert-ir/colbertv2.0", "answerdotai/answerai-colbert-small-v1"),
    options=ColbertOptions,
    opened=BertColbert,
    architectures=("BertModel", "BertForMaskedLM", "BertForPreTraining", STANFORD),
    task="tokens",
)
