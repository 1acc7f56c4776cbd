"""Qwen3-VL-Embedding: images of any size and texts in any order, to the state of the last token.

Opening, prompts, resizing and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.options import OptionsFamily
from tessera.models.qwen3_vl_embedding.model import FAMILY_NAME, Options, Qwen3VLEmbedding

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("qwen3_vl",),
    hub_models=("Qwen/Qwen3-VL-Embedding-2B", "Qwen/Qwen3-VL-Embedding-8B"),
    options=Options,
    opened=Qwen3VLEmbedding.open,
)
