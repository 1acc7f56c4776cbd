"""Llama Nemotron Embed VL: a SigLIP encoder, a pixel-shuffle projector and a bidirectional Llama.

Opening, prompts, tiling and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""

from __future__ import annotations

from pathlib import Path

from tessera.checkpoint.section import Section
from tessera.models.base import Family
from tessera.models.llama_nemotron_vl.model import FAMILY_NAME, LlamaNemotronVL
from tessera.models.options import NoOptions, OptionsFamily
from tessera.models.tower import CONFIG_FILE

__all__ = ["FAMILY"]


def _open(path: Path) -> LlamaNemotronVL:
    # Late interaction has the same class, and may have no other mark than this one.
    if Section.read(path / CONFIG_FILE).values.get("pooling") == "colbert":
        from tessera.models.llama_nemotron_colembed_vl.model import LlamaNemotronColEmbedVL

        return LlamaNemotronColEmbedVL.open(path)
    return LlamaNemotronVL.open(path)


FAMILY: Family = OptionsFamily(
    name=FAMILY_NAME,
    model_types=("llama_nemotron_vl",),
    hub_models=("nvidia/llama-nemotron-embed-vl-1b-v2",),
    options=NoOptions,
    opened=lambda path, _: _open(path),
    architectures=("LlamaNemotronVLModel",),
)
