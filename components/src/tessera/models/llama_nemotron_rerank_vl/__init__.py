"""Llama Nemotron Rerank VL: a query and a page, through the towers of Embed VL, to one score."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.llama_nemotron_rerank_vl.model import FAMILY_NAME, LlamaNemotronRerankVL
from tessera.models.options import NoOptions, OptionsFamily

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("llama_nemotron_vl_rerank",),
    hub_models=("nvidia/llama-nemotron-rerank-vl-1b-v2",),
    options=NoOptions,
    opened=lambda path, _: LlamaNemotronRerankVL.open(path),
)
