"""Qwen3-Embedding: text alone, through a causal decoder, to the state of the last token."""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.options import OptionsFamily
from tessera.models.qwen3_embedding.model import FAMILY_NAME, Options, Qwen3Embedding

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("qwen3",),
    hub_models=("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-8B"),
    options=Options,
    opened=Qwen3Embedding.open,
)
