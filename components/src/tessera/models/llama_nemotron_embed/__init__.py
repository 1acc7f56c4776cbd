"""Llama Nemotron Embed: text alone, through a bidirectional Llama, to the mean of all states."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.llama.config import EMBEDDING
from tessera.models.llama_nemotron_embed.model import FAMILY_NAME, LlamaNemotronEmbed, Options
from tessera.models.options import OptionsFamily

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("llama_bidirec",),
    hub_models=("nvidia/llama-nemotron-embed-1b-v2",),
    options=Options,
    opened=LlamaNemotronEmbed,
    architectures=(EMBEDDING,),
)
