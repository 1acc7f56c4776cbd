"""A ColBERT checkpoint with the body of RoBERTa as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from tessera.checkpoint.declared import STANFORD
from tessera.models.base import Family, architectures_of
from tessera.models.encoder.colbert import ColbertModel
from tessera.models.encoder.model import ColbertOptions
from tessera.models.options import OptionsFamily
from tessera.models.xlm_roberta.model import FAMILY as DENSE
from tessera.models.xlm_roberta.model import XlmRoberta


class XlmRobertaColbert(ColbertModel, XlmRoberta):
    """Implements ``tessera.models.base.Model``; its output is a vector of each token."""

    family = "xlm_roberta_colbert"
    mask, unknown = "<mask>", "<unk>"
    files = ColbertModel.files


FAMILY: Family = OptionsFamily(
    name=XlmRobertaColbert.family,
    model_types=tuple(DENSE.model_types),
    options=ColbertOptions,
    opened=XlmRobertaColbert,
    architectures=(*architectures_of(DENSE), STANFORD),
    task="tokens",
)
