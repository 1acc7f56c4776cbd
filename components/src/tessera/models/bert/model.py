"""A checkpoint of BERT as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.encoder.model import EncoderModel, Options
from tessera.models.options import OptionsFamily


class Bert(EncoderModel):
    """Implements ``tessera.models.base.Model``."""

    family = "bert"


FAMILY: Family = OptionsFamily(
    name=Bert.family,
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
