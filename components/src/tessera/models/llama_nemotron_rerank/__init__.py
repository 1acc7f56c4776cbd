"""Llama Nemotron Rerank: a query and a document, through a bidirectional Llama, to one score."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.llama.config import SCORING
from tessera.models.llama_nemotron_rerank.model import FAMILY_NAME, LlamaNemotronRerank, Options
from tessera.models.options import OptionsFamily

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("llama_bidirec",),
    hub_models=("nvidia/llama-nemotron-rerank-1b-v2",),
    options=Options,
    opened=LlamaNemotronRerank,
    architectures=(SCORING,),
)
