"""Llama Nemotron ColEmbed VL: a query or a page, through towers like Embed VL's, to vectors of tokens."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.llama_nemotron_colembed_vl.model import FAMILY_NAME, LlamaNemotronColEmbedVL
from tessera.models.options import NoOptions, OptionsFamily

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("llama_nemotron_vl",),
    hub_models=("nvidia/llama-nemotron-colembed-vl-3b-v2",),
    options=NoOptions,
    opened=lambda path, _: LlamaNemotronColEmbedVL.open(path),
    architectures=("LlamaNemotronColEmbedVLModel",),
)
