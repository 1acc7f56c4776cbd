"""Llama Nemotron Embed VL: a SigLIP encoder, a pixel-shuffle projector and a bidirectional Llama.

Opening, prompts, tiling and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""

from __future__ import annotations

from tessera.models.base import Family
from tessera.models.llama_nemotron_vl.model import FAMILY_NAME, LlamaNemotronVL
from tessera.models.options import NoOptions, OptionsFamily

__all__ = ["FAMILY"]

FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("llama_nemotron_vl",),
    options=NoOptions,
    opened=lambda path, _: LlamaNemotronVL.open(path),
)
